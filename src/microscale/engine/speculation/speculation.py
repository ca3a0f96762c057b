"""A drafter at work in an engine: which requests get a draft, how long it may be, and how many were accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from microscale.engine.limits import DRAFTED_SEQUENCES
from microscale.engine.output import Stats
from microscale.engine.request import Request
from microscale.engine.speculation.config import SpeculativeConfig
from microscale.engine.speculation.drafter import Context, DeviceDrafter, Drafter, DraftTarget, LaunchedStep
from microscale.engine.speculation.head import HeadDrafter
from microscale.engine.speculation.length import AutomaticLength, DraftCosts, FixedLength, Length, acceptance_for
from microscale.engine.speculation.ngram import NgramDrafter
from microscale.engine.work import Work
from microscale.models.config import LayerKind
from microscale.models.draft_heads.drafting import DraftHead
from microscale.planning.decision import Plan

if TYPE_CHECKING:
    from torch import Tensor

RECENT_STEPS = 32
"""Steps that the reported length of drafts is an average of."""


class Counts:
    """Counts of all drafts."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._times: dict[tuple[int, int], int] = {}
        """(tokens drafted, tokens accepted) → how often."""
        self._length = 0.0
        """The average length of recent drafts, over all sequences, also those without drafts."""

    def add(self, drafted: int, accepted: int) -> None:
        result = drafted, accepted
        self._times[result] = self._times.get(result, 0) + 1

    def stepped(self, lengths: Sequence[int]) -> None:
        """All sequences of a step decoded, with drafts of these lengths."""
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
    """The engine's interface to a drafter."""

    def __init__(self, drafter: Drafter, most: int, length: Length | None = None) -> None:
        """``most``: the maximum length of a draft; ``length`` may choose shorter ones."""
        self._drafter = drafter
        self._head = drafter if isinstance(drafter, HeadDrafter) else None
        self._ahead = drafter if isinstance(drafter, DeviceDrafter) else None
        self.most = most
        self._length: Length = FixedLength(most) if length is None else length
        self._target_first_runs: Callable[[], int] = lambda: 0
        self._states = False
        """The target has layers of states."""
        self.counts = Counts(most)

    @classmethod
    def of(
        cls, config: SpeculativeConfig, costs: DraftCosts | None = None, head: DraftHead | None = None
    ) -> Speculation:
        """``costs``: what steps cost; without it drafts have the length that the config says. ``head``: for the methods
        that are models."""
        most, by_sequences = config.num_speculative_tokens, config.num_speculative_tokens_per_batch_size
        drafter: Drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
        if head is not None:
            drafter = HeadDrafter(head, most)
        if costs is None or by_sequences is not None:
            return cls(drafter, most, FixedLength(most, by_sequences or ()))
        return cls(drafter, most, AutomaticLength(costs, most))

    def propose(
        self, requests: Sequence[Request], cut: Callable[[Request, Sequence[int]], Sequence[int]]
    ) -> dict[str, Sequence[int]]:
        """Request id → draft, for the requests that get one. ``cut`` returns the part of a draft that may be
        verified."""
        contexts = self._contexts(requests)
        drafts = self._drafter.propose(contexts) if contexts else []
        proposed = {}
        for context, draft in zip(contexts, drafts, strict=True):
            if draft and (kept := cut(context.request, draft[: context.most])):
                proposed[context.request.request_id] = kept
        return proposed

    @property
    def drafts_ahead(self) -> bool:
        """Drafts are on the device: a step with them can be launched before the last one is read."""
        return self._ahead is not None

    def ahead(self, schedule: Sequence[Work]) -> tuple[Tensor, list[int]] | None:
        """Drafts on the device for the requests of a running step, and the length of each; ``None``: there are none
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
        """Whether some of them may get a draft if the tokens of the running step are read first."""
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

    def attach(self, target: DraftTarget) -> None:
        """Attach to an engine, before its first step."""
        self._target_first_runs = target.first_runs
        self._states = LayerKind.LINEAR in target.pools
        if self._head is not None:
            self._head.attach(target)

    def first_runs(self) -> int:
        """The number of steps, of the target and of a head, that were the first of their kind or captured a graph."""
        return self._target_first_runs() + (0 if self._head is None else self._head.first_runs())

    def prepare(self) -> None:
        """Prepare what the first steps need."""
        if self._head is not None:
            self._head.prepare()

    def observe(self, step: LaunchedStep) -> None:
        if self._head is None:
            self._drafter.observe(step, self.most)
            return
        if self._length.rests(len(step.schedule)):
            self._head.rest(step)
            return
        self._head.follow(step)
        drew = [work.request for work in step.schedule if work.request.request_id in step.first_rows]
        contexts = self._contexts(drew)
        if self._states and len(drew) < len(step.schedule):
            contexts = []  # a prompt goes on in the next step, which therefore has no drafts
        self._drafter.observe(step, max((context.most for context in contexts), default=0))

    def landed(self, work: Work, accepted: int) -> None:
        self.counts.add(len(work.drafts), accepted)
        self._length.landed(work.request, len(work.drafts), accepted)

    def ended(self, schedule: Sequence[Work]) -> None:
        """The tokens of a step were read. What became of its drafts follows (``landed``)."""
        if all(work.verifies for work in schedule):
            self.counts.stepped([len(work.drafts) for work in schedule])
            self._length.stepped()

    def forget(self, request_id: str) -> None:
        self._drafter.forget(request_id)
        self._length.forget(request_id)

    def _contexts(self, requests: Sequence[Request], drafted: Sequence[int] | None = None) -> list[Context]:
        """Requests that may get a draft, and the maximum length of each. The last token of a request is drawn and never
        drafted. With penalties each token changes how the next one is drawn, so such a request runs without drafts, and
        so does one of which a head has missed a step. ``drafted``: lengths of drafts in a step that was not read."""
        head = self._head
        able = [r for r in requests if not r.params.penalised and (head is None or head.follows(r))]
        unread = {} if drafted is None else {r.request_id: 1 + n for r, n in zip(requests, drafted, strict=True)}
        lengths = self._length.choose(able, len(requests))  # in every step: a head may rest after many without drafts
        if self._states and len(requests) > DRAFTED_SEQUENCES:
            return []
        contexts = []
        for request, length in zip(able, lengths, strict=True):
            generated = request.num_generated + unread.get(request.request_id, 0)
            most = min(length, request.params.max_tokens - generated - 1)
            if most > 0:
                contexts.append(Context(request, most))
        return contexts


def describe_drafts(
    config: SpeculativeConfig, costs: DraftCosts | None, max_sequences: int = 1, plan: Plan | None = None
) -> dict[str, Any]:
    """What ``/plan`` says about a drafter. ``costs``: what steps cost, where that is known. ``plan``: the kernels of a
    drafter that is a model."""
    lengths = sorted({1, 3, 7, config.num_speculative_tokens})
    sizes = [1 << power for power in range((max_sequences - 1).bit_length() + 1)]
    decisions = [] if plan is None else list(plan.decisions.values())
    return {
        "method": config.method,
        "num_speculative_tokens": config.num_speculative_tokens,
        "length": "auto" if config.num_speculative_tokens_per_batch_size is None else "fixed",
        "predicted": [
            _step(costs.ratio(size, length), size, length)
            for size in sizes if costs is not None
            for length in lengths if length <= config.num_speculative_tokens
        ],
        "decisions": [
            decision.to_json() | {"format": getattr(decision.spec, "weight_format", "")} for decision in decisions
        ],
    }  # fmt: skip


def _step(ratio: float, sequences: int, drafts: int) -> dict[str, Any]:
    """The cost of a step with drafts relative to one without, and from which acceptance on it is faster."""
    pays = acceptance_for(max(ratio, 1.0), drafts)
    return {
        "sequences": sequences,
        "drafts": drafts,
        "ratio": round(ratio, 3),
        "pays_from_acceptance": None if pays is None else round(pays, 3),
    }
