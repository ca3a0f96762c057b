"""``microscale bench MODEL --speculative-acceptance 0.7``: steps with drafts, of which a set share is accepted.

Drafts are random tokens, and verified as all drafts are; only then the bench's own sampler says how many of them were
accepted, by chance. So the figures need no drafter, hold for any weights, and say what each number of drafts costs: in
tokens a second for the acceptance that was set, and for lengths that publishers of draft heads name. With a draft head
its drafts are verified instead, and its passes are in the times; no drafts are then measured without it.

All numbers of drafts are measured by turns (``TURNS``). ``auto`` is the length that the engine chooses by itself. Steps
grow slower with the context, so its steps are those of requests one after the other, each as long as those of the other
rows, and tokens are counted as theirs are: what a length gives on average. Which lengths it chose is printed too
(``chosen``).

The floor is the same step's bytes and operations at the card's full rates, with as many experts read as its tokens are
expected to use.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from microscale.engine.engine import Engine
from microscale.engine.limits import Limits
from microscale.engine.loading.build import assemble
from microscale.engine.loading.drafting import draft_costs
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.sampling_state import Drawn, Sampler
from microscale.engine.speculation.drafter import Context, Drafter, LaunchedStep
from microscale.engine.speculation.length import AutomaticLength, DraftCosts, Length, tokens_of
from microscale.engine.token_readback import Reading, SampledLists
from microscale.explain.speculative import DraftedStep, drafted_steps
from microscale.models.config import LayerKind
from microscale.models.families import AnyModel
from microscale.models.outline import Outline
from microscale.planning.plan import Setup
from microscale_lab.model_bench.chosen import ChosenStep, RecordingSpeculation
from microscale_lab.model_bench.speculative_table import LENGTHS, DraftRow

if TYPE_CHECKING:
    from torch import Tensor

AUTO = "auto"
TURNS = 4
"""Every number of drafts is measured so often, one after the other: a card that has worked for some seconds is slower
than one that is cool, by 4 % at 64 sequences."""
WARM_UP = 6
"""Steps before those that are timed: the first capture their graph."""
AT_ONCE = 64
"""Steps with drafts of one length for which it is said at once how many are accepted."""
MAX_DRAFT = 16
ANY_TOKENS = 1024 * MAX_DRAFT
STEP_TOKENS = 8192


@dataclass(frozen=True)
class DraftBenchPlan:
    """What is measured."""

    acceptance: float
    """Of a drafted token after accepted ones."""
    drafts: tuple[int | str, ...]
    """Of each sequence; ``AUTO``: as the engine chooses, up to the most of the others."""
    depth: int
    """Tokens of context before the first step."""
    steps: int = 32
    """Of a request."""
    auto_steps: int = 300
    """With ``AUTO``, of several requests, at least."""
    auto_learns: int = 100
    """Steps before them, in which it finds the length, and graphs are captured."""

    @property
    def most(self) -> int:
        return max((count for count in self.drafts if isinstance(count, int)), default=0) or 7

    @property
    def auto_requests(self) -> int:
        """Of each sequence in each turn."""
        return -(-self.auto_steps // (TURNS * self.steps))

    @property
    def longest(self) -> int:
        """Positions of a sequence, at most."""
        return self.depth + (WARM_UP + self.steps + 2) * (1 + self.most)


@dataclass(frozen=True)
class _Measured:
    """Of one step, as means."""

    seconds: float
    tokens: float
    drafts: float
    """Of a sequence."""
    steps: tuple[ChosenStep, ...]

    @classmethod
    def of(cls, seconds: float, steps: Sequence[ChosenStep], sequences: int) -> _Measured:
        """``seconds``: of all steps that count."""
        kept = [step for step in steps if step.counts]
        number = max(len(kept), 1)
        tokens, drafts = sum(step.given for step in kept), sum(sum(step.lengths) for step in kept)
        return cls(seconds / number, tokens / number, drafts / number / sequences, tuple(steps))


class _Set(Length):
    """The length that the bench says."""

    tokens = 0

    def choose(self, requests: Sequence[Request], sequences: int) -> Sequence[int]:
        return [self.tokens] * len(requests)


class _AnyTokens:
    """Drafts at random, which cost nothing. They are on the device too, as a head's are."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        chance = random.Random(0)
        self._tokens = [chance.randrange(vocab) for _ in range(ANY_TOKENS)]
        self._there = torch.tensor(self._tokens, device=device).view(-1, MAX_DRAFT)
        self._turn = 0

    def observe(self, step: LaunchedStep, most: int) -> None:
        pass

    def expects(self, context: Context) -> bool:
        return True

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        self._turn += 1
        firsts = range(self._turn, self._turn + len(contexts))
        return [self._draft(at * MAX_DRAFT % ANY_TOKENS, c.most) for at, c in zip(firsts, contexts, strict=True)]

    def _draft(self, first: int, count: int) -> Sequence[int]:
        return self._tokens[first : first + count]

    def drafts_ahead(self, requests: Sequence[Request], most: int) -> Tensor | None:
        self._turn += 1
        first = self._turn % (len(self._there) - len(requests) + 1)
        return self._there[first : first + len(requests), :most]

    def forget(self, request_id: str) -> None:
        pass


_Accepted: TypeAlias = "tuple[list[int], Tensor]"
"""Drafts of each request that are accepted: on the host, and on the device."""


class _ByChance(Sampler):
    """Draws as usual, and accepts drafts at random. Only a benchmark may do that: the tokens are not the model's."""

    def __init__(self, *given: Any, acceptance: float) -> None:
        super().__init__(*given)
        self._acceptance = acceptance
        self._chance = random.Random(1)
        self._ready: dict[tuple[int, int], list[_Accepted]] = {}
        """For steps to come, by sequences and the length of all their drafts."""
        self._counts_of: WeakKeyDictionary[Reading, _Accepted] = WeakKeyDictionary()
        """Of what was drawn: the host knows it at once, and acts as if not."""

    def _chosen(self, drawn: Drawn) -> _Accepted:
        if drawn.reading not in self._counts_of:
            lengths = [len(draft) for draft in drawn.drafts]
            even = len(set(lengths)) == 1
            ready = self._ready.setdefault((len(lengths), lengths[0]), []) if even else []
            if not ready:
                ready += self._choose(lengths, AT_ONCE if even else 1)
            self._counts_of[drawn.reading] = ready.pop()
        return self._counts_of[drawn.reading]

    def _choose(self, lengths: Sequence[int], steps: int) -> list[_Accepted]:
        """Choose for several steps at once: a server finds this among its tokens, and copies nothing to the device."""
        counts = [[self._count(length) for length in lengths] for _ in range(steps)]
        return list(zip(counts, self._layouts.to_device(torch.tensor(counts)), strict=True))

    def _count(self, drafted: int) -> int:
        return next((n for n in range(drafted) if self._chance.random() >= self._acceptance), drafted)

    def _given(self, drawn: Drawn) -> Tensor | None:
        return self._chosen(drawn)[1]

    def _accepted(self, drawn: Drawn, values: SampledLists) -> list[int]:
        (counts, _), at = self._chosen(drawn), 0
        drafts = drawn.drafts if drawn.ahead is None else drawn.reading.drafts()
        for count, draft, own in zip(counts, drafts, drawn.drafts, strict=True):
            values.tokens[at : at + count] = draft[:count]
            at += 1 + len(own)
        return counts


@dataclass(frozen=True)
class BenchHead:
    """A drafter that is a model."""

    make: Callable[[int], Drafter]
    """Make it for an engine of its own, given the maximum length of a draft."""
    costs: DraftCosts


class _Batch:
    """So many sequences in an engine of their own, measured with one number of drafts after the other."""

    def __init__(
        self,
        model: AnyModel,
        shape: Outline,
        setup: Setup,
        plan: DraftBenchPlan,
        sequences: int,
        head: BenchHead | None = None,
    ) -> None:
        self._model = model
        self._plan = plan
        self._sequences = sequences
        self._turn = 0
        self._shape, self._setup, self._head = shape, setup, head
        self._set = _Set()
        self._speculations: dict[Engine, RecordingSpeculation] = {}
        self._engine = self._new_engine(self._set, head)
        self._without = self._engine if head is None else self._new_engine(self._set, None)
        """Where nothing is drafted: without the head, which runs behind every step."""

    def _new_engine(self, rule: Length, head: BenchHead | None) -> Engine:
        model, plan, count = self._model, self._plan, self._sequences
        size = model.page_size
        budget = max(STEP_TOKENS, count * (1 + plan.most))
        limits = Limits(
            page_size=size,
            window=model.config.sliding_window,
            max_num_seqs=count,
            max_num_batched_tokens=budget,
            max_model_len=model.config.max_context,
            prefix_caching=False,
            max_queue=count,
        )
        full = count * (-(-plan.longest // size) + 1)
        sliding = count * (-(-(limits.window + plan.most) // size) + 2) + -(-budget // size)
        drafter = _AnyTokens(model.config.vocab_size, model.device) if head is None else head.make(plan.most)
        speculation = RecordingSpeculation(drafter, plan.most, rule)
        engine = assemble(
            model,
            limits,
            {LayerKind.FULL: full, LayerKind.SLIDING: min(sliding, full + count)},
            speculation=speculation,
            make_sampler=partial(_ByChance, acceptance=plan.acceptance),
        )
        self._speculations[engine] = speculation
        return engine

    def measure(self) -> dict[int | str, _Measured]:
        """By drafts, all of the plan's, by turns."""
        plan = self._plan
        auto = self._new_choosing() if AUTO in plan.drafts else None
        steps: dict[int | str, list[ChosenStep]] = {drafts: [] for drafts in plan.drafts}
        seconds = dict.fromkeys(plan.drafts, 0.0)
        for drafts in (each for _ in range(TURNS) for each in plan.drafts):
            choosing, fixed = auto if drafts == AUTO else None, self._engine if drafts else self._without
            if isinstance(drafts, int):
                self._set.tokens = drafts
            while choosing is not None and len(steps[AUTO]) < plan.auto_learns:
                steps[AUTO] += self._run_requests(choosing, learning=True)[1]
            for _ in range(plan.auto_requests if choosing else 1):
                took, found = self._run_requests(choosing or fixed)
                seconds[drafts] += took
                steps[drafts] += found
        if auto is not None:
            del self._speculations[auto]
        return {drafts: _Measured.of(seconds[drafts], steps[drafts], self._sequences) for drafts in plan.drafts}

    def _new_choosing(self) -> Engine:
        """An engine that chooses by itself."""
        model, plan, head = self._model, self._plan, self._head
        costs = draft_costs(self._shape, model.ops.plan, self._setup) if head is None else head.costs
        engine = self._new_engine(AutomaticLength(costs, plan.most), head)
        engine.prepare()
        return engine

    def _run_requests(self, engine: Engine, *, learning: bool = False) -> tuple[float, list[ChosenStep]]:
        """Requests from their prompts on: the seconds of all steps that count, and every step."""
        self._submit(engine)
        for _ in range(WARM_UP):
            engine.step()
        found = self._time(engine, learning)
        for at in range(self._sequences):
            engine.abort(f"{self._turn}-{at}")
        return found

    def _time(self, engine: Engine, learning: bool) -> tuple[float, list[ChosenStep]]:
        """A step in which a graph is captured, 20 to 50 ms on an H200, is left out: with lengths that change a new size
        comes up now and then, in a server once in its life."""
        speculation, found = self._speculations[engine], []
        seconds, ended = 0.0, self._now()
        for _ in range(self._plan.steps):
            began, seen = ended, speculation.first_runs()
            given = len(engine.step())
            ended = time.perf_counter()
            captured = speculation.first_runs() != seen
            seconds += 0.0 if captured else ended - began
            found.append(ChosenStep((ended - began) * 1e3, speculation.last, captured, learning, given))
        return seconds + self._now() - ended, found

    def _submit(self, engine: Engine) -> None:
        """Prompts, computed to their first token."""
        self._turn += 1
        chance = random.Random(self._turn)
        params = SamplingParams(max_tokens=self._plan.longest - self._plan.depth, ignore_eos=True)
        for at in range(self._sequences):
            prompt = [chance.randrange(self._model.config.vocab_size) for _ in range(self._plan.depth)]
            engine.submit(Request(f"{self._turn}-{at}", prompt, params))
        begun: set[str] = set()
        while len(begun) < self._sequences:
            begun.update(output.request_id for output in engine.step())

    def _now(self) -> float:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return time.perf_counter()


def run(
    model: AnyModel,
    shape: Outline,
    setup: Setup,
    plan: DraftBenchPlan,
    batches: Sequence[int],
    head: BenchHead | None = None,
) -> Iterator[DraftRow]:
    """Rows, when all of a number of sequences are measured."""
    gc.collect()
    gc.freeze()
    for sequences in batches:
        batch = _Batch(model, shape, setup, plan, sequences, head)
        counts = [count for count in plan.drafts if isinstance(count, int)]
        costs = draft_costs(shape, model.ops.plan, setup) if head is None else head.costs
        steps = drafted_steps(shape, model.ops.plan, setup, costs, sequences, counts, max(plan.depth, 1))
        known = {step.drafts: step for step in steps}
        measured = batch.measure()
        alone = measured[0].seconds if 0 in measured else None
        for drafts, found in measured.items():
            yield _row(plan, sequences, drafts, found, alone, known.get(_number(drafts)))


def _number(drafts: int | str) -> int:
    return drafts if isinstance(drafts, int) else -1


def _row(
    plan: DraftBenchPlan,
    sequences: int,
    drafts: int | str,
    measured: _Measured,
    alone: float | None,
    known: DraftedStep | None,
) -> DraftRow:
    # The mean that the acceptance stands for, not what chance made of a few steps.
    seconds, steps = measured.seconds, () if isinstance(drafts, int) else measured.steps
    kept = [step for step in steps if step.counts]
    chosen = sum(step.tokens(plan.acceptance) for step in kept) / max(len(kept), 1) / sequences
    each = tokens_of(plan.acceptance, drafts) if isinstance(drafts, int) else chosen
    at = {f"{n:g}": sequences * n / seconds if n <= _number(drafts) + 1 else None for n in LENGTHS}
    return DraftRow(
        sequences, drafts, seconds * 1e3, None if alone is None else seconds / alone,
        None if known is None else known.us / 1e3,
        None if known is None else known.experts, each, sequences * each / seconds, at, measured.drafts, steps,
    )  # fmt: skip
