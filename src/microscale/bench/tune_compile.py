"""Compiles what ``microscale tune`` will start, on all cores, into the cache that launches read.

Processes are forked, as ``prove`` does it: a kernel holds what cannot be pickled. They compile for a named target and
never ask the driver, which a forked process could not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial

from microscale.hardware import Gpu
from microscale.kernels.launch import Kernel
from microscale.prove.compiler import fill_cache, warm_up
from microscale.prove.pool import run_forked, usable_cores

LIMIT_S = 300.0
"""For one kernel. Above it the launch compiles, and waits."""


def compiler_for(gpu: Gpu) -> Callable[[Sequence[Kernel]], None]:
    """Compiles each kernel once."""
    known: set[Kernel] = set()

    def compile_all(kernels: Sequence[Kernel]) -> None:
        fresh = [kernel for kernel in dict.fromkeys(kernels) if kernel not in known]
        known.update(fresh)
        if len(fresh) < 2 or usable_cores() < 2:
            return  # the launch does it as fast
        warm_up(gpu.sm)
        with warnings.catch_warnings():
            # Python warns of a fork beside threads, which the driver has; these children take none of their locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            jobs = [partial(fill_cache, kernel, gpu.sm) for kernel in fresh]
            for _ in run_forked(jobs, num_workers=min(len(jobs), usable_cores()), limit_s=LIMIT_S):
                pass

    return compile_all
