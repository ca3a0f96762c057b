"""How long this CPU takes for what a step reads, by rates that are measured when they are first asked for.

The reference implementations decode their weights at every step, which takes far longer than reading them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from microscale.formats import FORMATS, block_format, decode, encode
from microscale.kernels.op import Implementation
from microscale.planning.estimate import Estimate, cost_of
from microscale.planning.plan import Setup

COLUMNS = 2880
READ_ROWS = 8192
"""94 MB, which few caches hold."""
DECODED_ROWS = 1024
RUNS = 2


def read_time(entry: Implementation[Any], spec: Any, setup: Setup, layer: str) -> Estimate:
    """The time to read, and where needed decode, what an implementation reads. Its arithmetic is not counted."""
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
