"""How fast a model decodes on this CPU at best: the bytes of a step over rates that are measured in a second.

The reference implementations decode their weights at every step, which takes far longer than reading them. Two layers
of gpt-oss-20b on two busy cores: at most 0.89 tokens per second with ``dequantized`` and 0.09 with ``reference``;
measured 0.48 and 0.05. Small models spend their time on other things, and are not measured: they are fast enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from microscale.engine.loading.memory import Memory
from microscale.engine.predictions import SHORT_CONTEXT
from microscale.engine.step_times import StepTimes, total
from microscale.formats import FORMATS, block_format, decode, encode
from microscale.hardware import GIB
from microscale.kernels.op import Implementation
from microscale.models.outline import Outline
from microscale.planning.decision import Plan
from microscale.planning.estimate import Estimate, cost_of
from microscale.planning.plan import Setup

SLOW = 0.5
"""Tokens per second below which a model is not started unless the user says so."""
SMALL_BYTES = GIB
COLUMNS = 2880
READ_ROWS = 8192
"""94 MB, which few caches hold."""
DECODED_ROWS = 1024
RUNS = 2


def decode_speed(outline: Outline, plan: Plan, setup: Setup, memory: Memory) -> float | None:
    """Tokens per second of one sequence, at most; ``None`` for a model that is small."""
    if sum(memory.weights.values()) < SMALL_BYTES:
        return None
    steps = StepTimes(outline, plan, setup, _time)
    return 1e6 / total(steps.decode(1, min(SHORT_CONTEXT, outline.max_context))).us


def _time(entry: Implementation[Any], spec: Any, setup: Setup, layer: str) -> Estimate:
    cost = cost_of(entry, spec, setup.gpu, setup.kv_size)
    held = getattr(spec, "weight_format", None)
    decodes = entry.name == "reference" and held in FORMATS
    us = 1e6 * cost.bytes / (decode_rate(held) if decodes else read_rate())
    return Estimate(us, us, cost.bytes, cost.flops, tuned=True)


@cache
def read_rate() -> float:
    """Bytes of float32 weights per second, in a product with one vector."""
    weights, vector = torch.ones(READ_ROWS, COLUMNS), torch.ones(COLUMNS)
    return weights.nbytes / _seconds(lambda: weights @ vector)


@cache
def decode_rate(name: str) -> float:
    """Bytes per second of weights that are decoded and then used once."""
    packed, vector = encode(torch.ones(DECODED_ROWS, COLUMNS), block_format(name)), torch.ones(COLUMNS)
    return (packed.values.nbytes + packed.scales.nbytes) / _seconds(lambda: decode(packed) @ vector)


def _seconds(work: Callable[[], object]) -> float:
    """The shortest of a few runs after one that does not count."""
    times = []
    for _ in range(RUNS + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times[1:])
