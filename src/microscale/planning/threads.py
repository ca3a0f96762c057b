"""How many CPU threads of torch a step gets: one, or all.

The threads of one product wait for each other at its end. On a busy machine one of them may be suspended for
milliseconds, and a decoding step of a small model has hundreds of products of a tenth of that. So a step whose products
are small gets one thread. The choice depends only on the model and the number of tokens: sums are added up in the same
order in every run, however busy the machine is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from microscale.errors import BadSetting
from microscale.hardware import Gpu
from microscale.planning import registry
from microscale.planning.decision import Plan
from microscale.planning.ops import MoeSpec

MAX_THREADS = 1024
SMALL_US = 250.0
"""A step whose products, on average, take one core less than this has one thread. The embedded model's do with up to
114 tokens; gpt-oss-20b's take 1700 with one."""
CORE_FLOPS, CORE_BYTES = 30e9, 10e9
"""What one core computes and reads in a second, roughly. A factor of two moves the bound on the tokens by no more."""


@cache
def all_threads() -> int:
    """The number that torch started with, before anything here changed it."""
    return torch.get_num_threads()


def check_threads(threads: int | None) -> None:
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise BadSetting(f"--threads {threads} is not between 1 and {MAX_THREADS}.")


def product_us(plan: Plan, gpu: Gpu, tokens: int) -> float:
    """How long one core takes for the average product of a step's layers, lm_head excluded. An expert is two
    products."""
    total, products = 0.0, 0
    for op, layer in plan.layers():
        if op not in ("dense", "moe") or layer == "lm_head":
            continue
        decision = plan.of(op, layer)[0]
        spec = replace(decision.spec, tokens=tokens)
        cost = registry.find(op, decision.chosen).cost(spec, gpu)
        total += 1e6 * max(cost.flops / CORE_FLOPS, cost.bytes / CORE_BYTES)
        products += 2 * min(spec.num_experts, spec.top_k * tokens) if isinstance(spec, MoeSpec) else 1
    return total / max(products, 1)


def wanted_threads(plan: Plan, gpu: Gpu, tokens: int, most: int) -> int:
    """Threads for a step of this many tokens, where there are ``most``."""
    return 1 if product_us(plan, gpu, tokens) < SMALL_US else most


class StepThreads:
    """Sets the number of threads before each step; ``fixed``: the same for all. It stays until the next step."""

    def __init__(self, plan: Plan, gpu: Gpu, fixed: int | None) -> None:
        most = all_threads()

        def wanted(tokens: int) -> int:
            return wanted_threads(plan, gpu, tokens, most) if fixed is None else fixed

        self._wanted: Callable[[int], int] = cache(wanted)
        self._on = gpu.is_cpu

    def give(self, tokens: int) -> None:
        """Called before a step of this many tokens. Does nothing on a GPU, where the host computes next to nothing."""
        if not self._on:
            return
        threads = self._wanted(tokens)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
