"""A drafter at work in an engine: who gets a draft, how long it may be, and what became of all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from microscale.engine.output import Stats
from microscale.engine.request import Request
from microscale.engine.speculation.config import SpeculativeConfig
from microscale.engine.speculation.costs import Prior
from microscale.engine.speculation.drafter import Context, DeviceDrafter, Drafter, Launched, Target
from microscale.engine.speculation.head import HeadDrafter
from microscale.engine.speculation.length import ByArithmetic, FixedLength, Length
from microscale.engine.speculation.ngram import NgramDrafter
from microscale.engine.work import Work
from microscale.models.draft_heads.drafting import DraftHead

if TYPE_CHECKING:
    from torch import Tensor

RECENT_STEPS = 32
"""Over which the length of drafts is a mean, as it is told."""
SLOW_HOST = 16
"""Steps in a row that were over before the host asked: then what it does takes longer than a step, and is the time."""


class Counts:
    """Of all drafts that ran."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._times: dict[tuple[int, int], int] = {}
        """How often so many tokens were drafted, and so many of them accepted."""
        self._length = 0.0
        """Of drafts lately: the mean over sequences, those without drafts among them."""

    def add(self, drafted: int, accepted: int) -> None:
        became = drafted, accepted
        self._times[became] = self._times.get(became, 0) + 1

    def stepped(self, lengths: Sequence[int]) -> None:
        """A step in which all sequences decoded, with drafts of these lengths."""
        self._length += (sum(lengths) / len(lengths) - self._length) / RECENT_STEPS

    def added_to(self, stats: Stats) -> Stats:
        times = self._times.items()
        drafted = tuple(sum(n for (count, _), n in times if count > place) for place in range(self._most))
        accepted = tuple(sum(n for (_, count), n in times if count > place) for place in range(self._most))
        return replace(
            stats,
            num_drafts=sum(self._times.values()),
            num_draft_tokens=sum(drafted),
            num_accepted_tokens=sum(accepted),
            drafted_per_pos=drafted,
            accepted_per_pos=accepted,
            draft_length=round(self._length, 3),
        )


class Speculation:
    """What an engine asks for drafts."""

    def __init__(
        self,
        drafter: Drafter,
        most: int,
        length: Length | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``most``: tokens of a draft, at most; ``length`` may want fewer. ``clock``: in seconds."""
        self._drafter = drafter
        self._head = drafter if isinstance(drafter, HeadDrafter) else None
        self._ahead = drafter if isinstance(drafter, DeviceDrafter) else None
        self.most = most
        self._length: Length = FixedLength(most) if length is None else length
        self._clock = clock
        self._last_end: float | None = None
        self._target_first_runs: Callable[[], int] = lambda: 0
        self._seen_first_runs = 0
        self._quiet = False
        """Nothing ran for the first time while the last step was waited for."""
        self._late = 0
        """Steps in a row that were over before the host asked for their tokens."""
        self.counts = Counts(most)

    @classmethod
    def of(cls, config: SpeculativeConfig, prior: Prior | None = None, head: DraftHead | None = None) -> Speculation:
        """``prior``: what steps are expected to cost; without it drafts are as long as the config says. ``head``: of
        the methods that are models."""
        most, by_sequences = config.num_speculative_tokens, config.num_speculative_tokens_per_batch_size
        drafter: Drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
        if head is not None:
            drafter = HeadDrafter(head, most)
        if prior is None or by_sequences is not None:
            return cls(drafter, most, FixedLength(most, by_sequences or ()))
        return cls(drafter, most, ByArithmetic(prior, most))

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

    @property
    def drafts_ahead(self) -> bool:
        """Drafts are on the device: a step with them can be launched before the last one is read."""
        return self._ahead is not None

    def ahead(self, schedule: Sequence[Work]) -> tuple[Tensor, list[int]] | None:
        """Drafts for the requests of a step that runs, on the device, and of how many tokens; ``None``: nobody gets one
        before the step is read."""
        requests = [work.request for work in schedule]
        contexts = self._contexts(requests, [len(work.drafts) for work in schedule]) if self._ahead else []
        most = {context.request.request_id: context.most for context in contexts}
        drafts = self._ahead.drafts_ahead(requests, max(most.values())) if self._ahead and most else None
        if drafts is None:
            return None
        longest = drafts.shape[1]
        return drafts, [min(most.get(request.request_id, 0), longest) for request in requests]

    def expects(self, requests: Sequence[Request]) -> bool:
        """Whether some of them may get a draft if the tokens of the step that runs are read first."""
        return any(map(self._drafter.expects, self._contexts(requests)))

    @property
    def has_head(self) -> bool:
        """The drafter is a draft head."""
        return self._head is not None

    @property
    def taps(self) -> tuple[int, ...]:
        """Where the drafter reads the target."""
        return self._head.taps if self._head is not None else ()

    @property
    def key_lookahead(self) -> int:
        return self._head.key_lookahead if self._head is not None else 0

    def attach(self, target: Target) -> None:
        """To an engine, before its first step."""
        self._target_first_runs = target.first_runs
        if self._head is not None:
            self._head.attach(target)

    def first_runs(self) -> int:
        """Steps so far, of the target and of a head, that were the first of their kind or captured a graph."""
        return self._target_first_runs() + (0 if self._head is None else self._head.first_runs())

    def prepare(self) -> None:
        """Make ready what the first steps will want."""
        if self._head is not None:
            self._head.prepare()

    def observe(self, step: Launched) -> None:
        if self._head is None:
            self._drafter.observe(step, self.most)
            return
        if self._length.rests(len(step.schedule)):
            self._head.rest(step)
            return
        self._head.follow(step)
        drew = [work.request for work in step.schedule if work.request.request_id in step.first_rows]
        self._drafter.observe(step, max((context.most for context in self._contexts(drew)), default=0))

    def landed(self, work: Work, accepted: int) -> None:
        self.counts.add(len(work.drafts), accepted)
        self._length.landed(work.request, len(work.drafts), accepted)

    def ended(self, schedule: Sequence[Work], *, waited: bool = True) -> None:
        """The tokens of a step are read, though no request has them yet. ``waited``: the host waited for them.

        Steps with prompts, and the first after an idle time, which has one, say nothing of what drafts cost; nor do
        those since whose predecessor something ran for the first time, or was captured. Nor does the next where a head
        may have been captured behind it: the GPU ran it meanwhile, and it seems to take no time. The same goes for all
        that the host may be late for: where it did not wait, this step seems longer than it was, and the next shorter.
        """
        now = self._clock()
        before, self._last_end = self._last_end, now
        seen, self._seen_first_runs = self._seen_first_runs, self.first_runs()
        quiet, self._quiet = self._quiet, seen == self._seen_first_runs
        late, self._late = self._late, 0 if waited else self._late + 1
        in_time = (waited and not late) or min(late, self._late) >= SLOW_HOST
        if before is not None and all(work.verifies for work in schedule):
            lengths = [len(work.drafts) for work in schedule]
            self.counts.stepped(lengths)
            if in_time and self._quiet and (quiet or self._ahead is None):
                self._length.timed([work.request for work in schedule], lengths, (now - before) * 1e6)
            else:
                self._length.passed(len(schedule))

    def forget(self, request_id: str) -> None:
        self._drafter.forget(request_id)
        self._length.forget(request_id)

    def _contexts(self, requests: Sequence[Request], drafted: Sequence[int] | None = None) -> list[Context]:
        """The last token that a request may have is drawn and not drafted. With penalties each token changes how the
        next is drawn, so such a request runs without drafts; so does one of which a head has missed a step.
        ``drafted``: what runs and is not read, of each a token and so many drafts."""
        head = self._head
        able = [r for r in requests if not r.params.penalised and (head is None or head.follows(r))]
        unread = {} if drafted is None else {r.request_id: 1 + n for r, n in zip(requests, drafted, strict=True)}
        found = []
        for request, length in zip(able, self._length.choose(able, len(requests)), strict=True):
            generated = request.num_generated + unread.get(request.request_id, 0)
            most = min(length, request.params.max_tokens - generated - 1)
            if most > 0:
                found.append(Context(request, most))
        return found
