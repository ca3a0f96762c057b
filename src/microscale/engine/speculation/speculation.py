"""A drafter at work in an engine: who gets a draft, how long it may be, and what became of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from microscale.engine.output import Stats
from microscale.engine.request import Request
from microscale.engine.speculation.config import SpeculativeConfig
from microscale.engine.speculation.drafter import Context, Drafter
from microscale.engine.speculation.length import FixedLength, Length
from microscale.engine.speculation.ngram import NgramDrafter
from microscale.engine.step.work import Work


@dataclass
class Counts:
    """Of all drafts that ran."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    """How often the first token of a draft was accepted, the second, …"""

    def add(self, drafted: int, accepted: int) -> None:
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        for place in range(accepted):
            self.accepted_per_pos[place] += 1

    def added_to(self, stats: Stats) -> Stats:
        return replace(
            stats,
            num_drafts=self.drafts,
            num_draft_tokens=self.draft_tokens,
            num_accepted_tokens=self.accepted_tokens,
            accepted_per_pos=tuple(self.accepted_per_pos),
        )


class Speculation:
    """What an engine asks for drafts."""

    def __init__(self, drafter: Drafter, most: int, length: Length | None = None) -> None:
        """``most``: tokens of a draft, at most; ``length`` may want fewer."""
        self._drafter = drafter
        self.most = most
        self._length: Length = FixedLength(most) if length is None else length
        self.counts = Counts(accepted_per_pos=[0] * most)

    @classmethod
    def of(cls, config: SpeculativeConfig) -> Speculation:
        drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
        return cls(drafter, config.num_speculative_tokens)

    def propose(
        self, requests: Sequence[Request], cut: Callable[[Request, Sequence[int]], Sequence[int]]
    ) -> dict[str, Sequence[int]]:
        """Drafts of those that get one. ``cut``: as much of one as may be verified."""
        contexts = self._contexts(requests)
        drafts = self._drafter.propose(contexts) if contexts else []
        found = {}
        for context, draft in zip(contexts, drafts, strict=True):
            if draft and (kept := cut(context.request, draft[: context.most])):
                found[context.request.request_id] = kept
        return found

    def expects(self, requests: Sequence[Request]) -> bool:
        """Whether some of them may get a draft if the tokens of the step that runs are read first."""
        return any(map(self._drafter.expects, self._contexts(requests)))

    def observe(self, schedule: Sequence[Work]) -> None:
        self._drafter.observe(schedule)

    def landed(self, work: Work, accepted: int) -> None:
        self.counts.add(len(work.drafts), accepted)
        self._length.landed(work.request, len(work.drafts), accepted)

    def forget(self, request_id: str) -> None:
        self._drafter.forget(request_id)

    def _contexts(self, requests: Sequence[Request]) -> list[Context]:
        """The last token that a request may have is drawn and not drafted. With penalties each token changes how the
        next is drawn, so such a request runs without drafts."""
        able = [r for r in requests if not r.params.penalised]
        lengths = zip(able, self._length.choose(able), strict=True)
        wanted = ((r, min(most, r.params.max_tokens - r.num_generated - 1)) for r, most in lengths)
        return [Context(request, most) for request, most in wanted if most > 0]
