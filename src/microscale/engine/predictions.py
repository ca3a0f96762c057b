"""How fast a model will decode and read prompts: looked up in a table where possible, else estimated.

``predictions.json`` has the times of the models and cards that we know, each with the factor by which it may be off in
nine of ten cases. ``microscale bench fit --write-table`` (in the lab) writes it: from measurements where a card was
measured, and fitted to the card's bandwidth, clock and peak rates elsewhere. Everything else (another shape, several
ranks, kernels that an option forces) gets the sum of its kernels' estimates, and no interval.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from microscale.engine.step_times import StepTimes, total
from microscale.hardware import card_name
from microscale.hardware.reachable_bandwidth import reach
from microscale.models.known_checkpoints import preset_of
from microscale.models.outline import Outline
from microscale.planning.choose_kernel import Preference
from microscale.planning.decision import Plan
from microscale.planning.ops import Activations
from microscale.planning.plan import Setup, estimated

FILE = Path(__file__).parent / "predictions.json"
BATCHES = (1, 8, 64)
SHORT_CONTEXT = 128
PROMPTS = (128, 2048)
STEP_LIMIT_FACTOR = 10.0
LEAST_STEP_LIMIT_S = 5.0
CPU_STEP_S = 300.0


class Phase(StrEnum):
    DECODE = "decode"
    PREFILL = "prefill"


class Basis(StrEnum):
    """What a time is based on."""

    MEASURED = "measured"
    """This model was measured on this kind of card."""
    FITTED = "fitted"
    """Kernels or models that were measured on another card, or other models on this one."""
    ESTIMATE = "estimate"
    """The sum of its kernels' estimates: bytes, operations, the card's rates and efficiencies."""


@dataclass(frozen=True)
class Time:
    """The microseconds of a step or of a prompt."""

    us: float
    factor: float | None
    """Nine of ten measurements lie between ``us / factor`` and ``us * factor``; ``None`` where that is unknown."""
    basis: Basis


@dataclass(frozen=True)
class Point:
    """Tokens per second of one case."""

    kind: Phase
    batch: int
    context: int
    tok_s: float
    low: float | None
    high: float | None
    """The 90 % interval."""
    ceiling: float
    """What the same bytes and operations allow any engine, by the data sheet."""
    reachable: float
    """The same at the bandwidth that reading reaches."""
    basis: Basis
    us: float
    """Of one step, or of the prompt, which is then the time to the first token."""

    def to_json(self) -> dict[str, Any]:
        context = "context" if self.kind is Phase.DECODE else "tokens"
        rates = {"tok_s": self.tok_s, "low": self.low, "high": self.high, "ceiling_tok_s": self.ceiling}
        fields: dict[str, Any] = {"batch": self.batch, context: self.context}
        fields |= {name: value if value is None else round(value, 1) for name, value in rates.items()}
        if self.kind is Phase.PREFILL:
            fields["first_token_ms"] = round(self.us / 1e3, 1)
        return fields | {"basis": self.basis.value}


def preset_name(model: str) -> str:
    """``openai/gpt-oss-20b`` and a folder of that name are the preset as far as speed goes."""
    return preset_of(model) or model.rstrip("/").rpartition("/")[2]


def predict(
    outline: Outline, plan: Plan, setup: Setup, kind: Phase, batch: int, context: int, step_tokens: int
) -> Point:
    """One case: ``batch`` sequences that decode after ``context`` tokens, or a prompt of ``context`` tokens."""
    steps = StepTimes(outline, plan, setup, estimated)
    if kind is Phase.DECODE:
        estimate, tokens = total(steps.decode(batch, context)), batch
    else:
        estimate, tokens = steps.prompt(context, step_tokens), context
    time = _known_time(outline.name, setup, kind, batch, context) or Time(estimate.us, None, Basis.ESTIMATE)
    tok_s, ceiling = tokens / time.us * 1e6, tokens / estimate.floor_us * 1e6
    low, high = (None, None) if time.factor is None else (tok_s / time.factor, tok_s * time.factor)
    memory_bound = estimate.bytes / (setup.gpu.bandwidth_gbs * 1e3) > 0.9 * estimate.floor_us
    reachable = ceiling * reach(setup.gpu).gbs / setup.gpu.bandwidth_gbs if memory_bound else ceiling
    return Point(kind, batch, context, tok_s, low, high, ceiling, reachable, time.basis, time.us)


def make_points(
    outline: Outline, plan: Plan, setup: Setup, batches: Sequence[int], contexts: Sequence[int],
    step_tokens: int, fits: Callable[[int, int], bool],
) -> list[Point]:  # fmt: skip
    """Decoding for every batch and context that ``fits``, then prompts."""
    prompts = sorted({*(size for size in PROMPTS if size <= outline.max_context), max(contexts)})
    cases = [(Phase.DECODE, batch, context) for context in contexts for batch in batches]
    cases += [(Phase.PREFILL, 1, tokens) for tokens in prompts]
    return [predict(outline, plan, setup, *case, step_tokens) for case in cases if fits(*case[1:])]


def step_limit_s(outline: Outline, plan: Plan, setup: Setup, sequences: int, context: int, step_tokens: int) -> float:
    """How long a step may take before the engine counts as hung: ten times the longest step's prediction. Times on a
    CPU are not predicted, and a prompt of a large model may take minutes there."""
    if setup.gpu.is_cpu:
        return CPU_STEP_S
    steps = StepTimes(outline, plan, setup, estimated)
    tokens = min(step_tokens, context)
    prompt = total(steps.prompt_step(tokens, context - tokens, last=True))
    longest_us = prompt.us + total(steps.decode(sequences, context)).us
    return max(LEAST_STEP_LIMIT_S, STEP_LIMIT_FACTOR * longest_us / 1e6)


# ---- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """The times of one model on one card in one precision."""

    batches: Sequence[int]
    contexts: Sequence[int]
    decode_us: Sequence[Sequence[float]]
    """By batch, then by context."""
    decode_factor: Sequence[float]
    """By batch."""
    prompts: Sequence[int]
    prefill_us: Sequence[float]
    prefill_factor: Sequence[float]
    basis: Basis

    def decode(self, batch: int, context: int) -> Time | None:
        if not self.batches[0] <= batch <= self.batches[-1]:
            return None
        # A step grows linearly with its context, and about as a power of its batch.
        by_batch = [_interpolate(self.contexts, row, context) for row in self.decode_us]
        us = math.exp(_interpolate(_logs(self.batches), _logs(by_batch), math.log(batch)))
        factor = _interpolate(_logs(self.batches), self.decode_factor, math.log(batch))
        return Time(us, factor, self.basis)

    def prefill(self, tokens: int) -> Time | None:
        if not self.prompts[0] <= tokens <= self.prompts[-1]:
            return None
        logs = _logs(self.prompts)
        us = math.exp(_interpolate(logs, _logs(self.prefill_us), math.log(tokens)))
        return Time(us, _interpolate(logs, self.prefill_factor, math.log(tokens)), self.basis)


def _known_time(model: str, setup: Setup, kind: Phase, batch: int, context: int) -> Time | None:
    """From the table; ``None`` where it does not have this model, card, precision or choice of kernels."""
    default = Setup(setup.gpu, Activations.BF16, Preference(), setup.precision)
    grid = _grids().get((preset_name(model), card_name(setup.gpu) or "", str(setup.precision)))
    if grid is None or setup != default:
        return None
    return grid.decode(batch, context) if kind is Phase.DECODE else grid.prefill(context)


@cache
def _grids() -> dict[tuple[str, str, str], Grid]:
    data = json.loads(FILE.read_text())
    return {
        (row["model"], row["gpu"], row["precision"]): Grid(
            data["batches"], data["contexts"], row["decode_us"], row["decode_factor"],
            data["prompts"], row["prefill_us"], row["prefill_factor"], Basis(row["basis"]),
        )
        for row in data["rows"]
    }  # fmt: skip


def _logs(values: Sequence[float]) -> list[float]:
    return [math.log(value) for value in values]


def _interpolate(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """Linear between neighbouring places, and beyond the outer ones."""
    right = min(max(bisect_right(places, at), 1), len(places) - 1)
    share = (at - places[right - 1]) / (places[right] - places[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])
