"""``microscale bench MODEL``: whole-model prefill and decode, from inside the engine, next to the ceiling.

``pp512`` is one prompt of 512 random tokens from an empty cache, to its first token. ``tg128`` is 128 tokens each for
``batch`` sequences that decode together after ``depth`` tokens of context; prefill is not in the figure. The first
runs of each row compile and capture, and are not counted. The ceiling is the same work at the card's full rates.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch

from microscale.bench.cases import BenchCase
from microscale.bench.energy import EnergyMeter
from microscale.engine.engine import Engine
from microscale.engine.limits import Limits
from microscale.engine.loading.build import assemble
from microscale.engine.predictions import Phase, predict
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.errors import Unsupported
from microscale.models.config import LayerKind
from microscale.models.families import AnyModel
from microscale.models.outline import Outline
from microscale.planning.plan import Setup

if TYPE_CHECKING:
    from microscale.engine.ranks.leader import RankTeam

ENERGY_S = 3.0
"""Additional seconds per row to measure its energy."""
UNCOUNTED = {"pp": 2, "tg": 1}
"""Runs that do not count. The first compiles, and the first two of a prompt do not replay a graph yet."""


@dataclass(frozen=True)
class Run:
    """The counted part of one run of a case."""

    tokens: int
    seconds: float
    joules: float = 0.0

    def __add__(self, other: Run) -> Run:
        return Run(self.tokens + other.tokens, self.seconds + other.seconds, self.joules + other.joules)

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class BenchRow:
    test: str
    batch: int
    depth: int
    tok_s: float
    ceiling_tok_s: float
    predicted_tok_s: float
    """The prediction of ``explain`` for the same work."""
    runs: tuple[float, ...]
    """Tokens per second of each run; ``tok_s`` is their median."""
    watts: float | None = None
    """Average power of the GPU over at least ``ENERGY_S`` of such runs."""
    tokens_per_joule: float | None = None


def run(
    model: AnyModel,
    shape: Outline,
    setup: Setup,
    cases: Sequence[BenchCase],
    step_tokens: int = 8192,
    repeats: int = 3,
    team: RankTeam | None = None,
    meter: EnergyMeter | None = None,
) -> Iterator[BenchRow]:
    """Yield rows as they are measured, each the median of ``repeats`` counted runs.

    ``team``: the ranks that run the model together; ceiling and prediction are then for one rank, without sums.
    ``meter``: measure the energy too.
    """
    gc.collect()
    gc.freeze()  # as the engine's process does
    for case in cases:
        engine = make_engine(model, case, step_tokens, team=team)
        uncounted = UNCOUNTED[case.kind]
        runs = [_measure(model, engine, case, turn, step_tokens) for turn in range(uncounted + repeats)]
        rates = [run.tok_s for run in runs[uncounted:]]
        kind = Phase.PREFILL if case.kind == "pp" else Phase.DECODE
        context = case.tokens if kind is Phase.PREFILL else max(case.depth + case.tokens // 2, 1)
        point = predict(shape, model.ops.plan, setup, kind, case.batch, context, step_tokens)
        rate = statistics.median(rates)
        row = BenchRow(case.name, case.batch, case.depth, rate, point.ceiling, point.tok_s, tuple(rates))
        if meter is not None:
            spent = _run_on(model, engine, case, uncounted + repeats, step_tokens, meter)
            row = replace(row, watts=spent.joules / spent.seconds, tokens_per_joule=spent.tokens / spent.joules)
        yield row


def _run_on(model: AnyModel, engine: Engine, case: BenchCase, turn: int, step_tokens: int, meter: EnergyMeter) -> Run:
    """Repeat runs for at least ``ENERGY_S``; their sum."""
    total = _measure(model, engine, case, turn, step_tokens, meter)
    while total.seconds < ENERGY_S:
        turn += 1
        total += _measure(model, engine, case, turn, step_tokens, meter)
    if not total.joules:
        raise Unsupported(
            f"The GPU's energy counter did not move during {total.seconds:.1f} s of work; leave out --energy."
        )
    return total


def _measure(
    model: AnyModel, engine: Engine, case: BenchCase, turn: int, step_tokens: int, meter: EnergyMeter | None = None
) -> Run:
    """One run. All runs share the engine, so later ones use the graphs that the first captured."""
    if case.kind == "pp":
        submit_random(engine, model.config.vocab_size, case.tokens, [1], turn)
        return _finish(engine, model.device, case.tokens, meter)
    tokens = begin_decoding(engine, model.config.vocab_size, case, step_tokens, turn)
    return _finish(engine, model.device, tokens, meter)


def begin_decoding(engine: Engine, vocab_size: int, case: BenchCase, step_tokens: int, turn: int = 0) -> int:
    """Run the engine until all prompts of a case are computed; the number of tokens that are left to decode."""
    new = _new_tokens(case, step_tokens)
    submit_random(engine, vocab_size, max(case.depth, 1), new, turn)
    # All prompts are computed when every sequence has its first token.
    begun: set[str] = set()
    early = 0
    engine.run_ahead = False  # a step that is launched already would not be timed
    while len(begun) < case.batch:
        outputs = engine.step()
        early += len(outputs)
        begun.update(output.request_id for output in outputs)
    engine.run_ahead = True
    return sum(new) - early


def submit_random(engine: Engine, vocab_size: int, prompt: int, new: Sequence[int], turn: int = 0) -> None:
    """Submit prompts of random tokens, each with its number of new tokens."""
    chooser = random.Random(turn)
    for index, count in enumerate(new):
        tokens = [chooser.randrange(vocab_size) for _ in range(prompt)]
        engine.submit(Request(f"{turn}-{index}", tokens, SamplingParams(max_tokens=count, ignore_eos=True)))


def _new_tokens(case: BenchCase, step_tokens: int) -> list[int]:
    """New tokens of each sequence. Those whose prompts are computed early get more, so that all end together."""
    first_steps = [(index + 1) * max(case.depth, 1) // step_tokens for index in range(case.batch)]
    return [case.tokens + 1 + first_steps[-1] - step for step in first_steps]


def make_engine(
    model: AnyModel, case: BenchCase, step_tokens: int, *, enforce_eager: bool = False, team: RankTeam | None = None
) -> Engine:
    """An engine whose page pool is just large enough for this case."""
    size = model.page_size
    limits = Limits(
        page_size=size,
        window=model.config.sliding_window,
        max_num_seqs=case.batch,
        max_num_batched_tokens=max(step_tokens, case.batch),
        max_model_len=model.config.max_context,
        prefix_caching=False,
        max_queue=case.batch,
    )
    longest = case.longest + case.batch * case.depth // step_tokens
    full = case.batch * -(-longest // size)
    sliding = case.batch * (-(-limits.window // size) + 1) + -(-limits.max_num_batched_tokens // size)
    pages = {LayerKind.FULL: full, LayerKind.SLIDING: min(sliding, full + case.batch)}
    return assemble(model, limits, pages, enforce_eager=enforce_eager, team=team)


def _finish(engine: Engine, device: torch.device, tokens: int, meter: EnergyMeter | None) -> Run:
    """Time the engine until it has nothing left to do, which produces ``tokens`` tokens."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    before = 0.0 if meter is None else meter.joules()
    start = time.perf_counter()
    while engine.has_work:
        engine.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    return Run(tokens, seconds, 0.0 if meter is None else meter.joules() - before)


def header(energy: bool = False) -> str:
    rate = f"{'tok/s':>10} {'spread':>6} {'ceiling':>10} {'of it':>6} {'explain says':>13}"
    return f"{'test':<8} {'batch':>5} {'depth':>6} {rate}" + (f" {'W':>5} {'tok/J':>7}" if energy else "")


def line(row: BenchRow) -> str:
    """``spread`` is the difference between the fastest and the slowest run."""
    share = 100 * row.tok_s / row.ceiling_tok_s
    spread = 100 * (max(row.runs) - min(row.runs)) / row.tok_s
    rate = f"{row.tok_s:>10.1f} {spread:>5.1f}% {row.ceiling_tok_s:>10.1f} {share:>5.0f}% {row.predicted_tok_s:>13.1f}"
    energy = "" if row.watts is None else f" {row.watts:>5.0f} {row.tokens_per_joule:>7.2f}"
    return f"{row.test:<8} {row.batch:>5} {row.depth:>6} {rate}{energy}"


def as_json(rows: Sequence[BenchRow]) -> list[dict[str, object]]:
    return [asdict(row) for row in rows]
