"""Compiles what ``microscale tune`` will start, on all cores, into the cache that launches read."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from triton.backends.compiler import GPUTarget

from microscale.hardware import WARP_SIZE, Gpu, system_memory
from microscale.kernels.compiling.cache import use_cache
from microscale.kernels.compiling.job import CompileJob, missing, run_job, workers
from microscale.kernels.launch import Kernel, recording

Compile = Callable[[Iterable[Callable[[], object]]], None]
"""Compiles what this work would start."""


def compiler_for(gpu: Gpu) -> Compile:
    """Compiles each kernel once. What cannot be compiled is left to the launch, which says why."""
    known: set[Kernel] = set()
    target = GPUTarget("cuda", gpu.sm, WARP_SIZE)

    def compile_all(works: Iterable[Callable[[], object]]) -> None:
        with recording() as found:
            for work in works:
                work()
        fresh = [kernel for kernel in found if kernel not in known]
        known.update(fresh)
        if len(fresh) < 2:
            return  # the launch does it as fast
        folder = use_cache()
        lacking = missing(fresh, target)
        for _ in (
            run_job(CompileJob(lacking, target, folder, min(len(lacking), workers(system_memory()[1]))))
            if lacking
            else ()
        ):
            pass

    return compile_all
