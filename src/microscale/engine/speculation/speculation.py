"""A drafter at work in an engine: who gets a draft, how long it may be, and what became of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from microscale.engine.output import Stats
from microscale.engine.request import Request
from microscale.engine.speculation.config import SpeculativeConfig
from microscale.engine.speculation.drafter import Context, Drafter, Launched, Target
from microscale.engine.speculation.head import HeadDrafter
from microscale.engine.speculation.length import FixedLength, Length
from microscale.engine.speculation.ngram import NgramDrafter
from microscale.engine.step.work import Work
from microscale.models.draft_heads.drafting import DraftHead


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
        self._head = drafter if isinstance(drafter, HeadDrafter) else None
        self.most = most
        self._length: Length = FixedLength(most) if length is None else length
        self.counts = Counts(accepted_per_pos=[0] * most)

    @classmethod
    def of(cls, config: SpeculativeConfig, head: DraftHead | None = None) -> Speculation:
        """``head``: of the methods that are models."""
        most = config.num_speculative_tokens
        if head is not None:
            return cls(HeadDrafter(head, most), most)
        return cls(NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max), most)

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

    @property
    def taps(self) -> tuple[int, ...]:
        """Where the drafter reads the target."""
        return self._head.taps if self._head is not None else ()

    @property
    def key_lookahead(self) -> int:
        return self._head.key_lookahead if self._head is not None else 0

    def attach(self, target: Target) -> None:
        """To an engine, before its first step."""
        if self._head is not None:
            self._head.attach(target)

    def prepare(self) -> None:
        """Make ready what the first steps will want."""
        if self._head is not None:
            self._head.prepare()

    def observe(self, step: Launched) -> None:
        drew = [work.request for work in step.schedule if work.request.request_id in step.first_rows]
        self._drafter.observe(step, max((context.most for context in self._contexts(drew)), default=0))

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
