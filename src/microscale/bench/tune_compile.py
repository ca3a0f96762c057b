"""Compiles what ``microscale tune`` will start, on all cores, into the cache that launches read.

Processes are forked, as ``prove`` does it: a kernel holds what cannot be pickled. A forked process cannot ask the
driver, so it is told the target, and then does what Triton does before a launch: the kernel is found in the cache
whatever the version makes of its arguments. Tensors stand there by their type and address, so that none is held.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from microscale.hardware import Gpu
from microscale.hardware.targets import WARP_SIZE
from microscale.kernels.launch import Kernel, Launch, taken_by
from microscale.prove.compiler import warm_up
from microscale.prove.pool import run_forked, usable_cores

LIMIT_S = 300.0
"""For one kernel. Above it the launch compiles, and waits."""

Compile = Callable[[Iterable[Callable[[], object]]], None]
"""Compiles what this work would start."""


@dataclass(frozen=True)
class Pointer:
    """A tensor as Triton sees it."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


class NamedTarget:
    """A driver that knows its target, and can start nothing."""

    def __init__(self, sm: int) -> None:
        self._target = GPUTarget("cuda", sm, WARP_SIZE)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def light_launches() -> Iterator[dict[Kernel, Launch]]:
    """Inside, kernels are listed and not started: each once, with pointers in place of its tensors."""
    found: dict[Kernel, Launch] = {}

    def hear(started: Launch) -> bool:
        arguments = (
            Pointer(each.dtype, each.data_ptr()) if isinstance(each, Tensor) else each for each in started.arguments
        )
        found.setdefault(started.kernel(), started._replace(arguments=tuple(arguments)))
        return False

    with taken_by(hear):
        yield found


def fill_cache(launch: Launch, sm: int, log: IO[bytes]) -> dict[str, Any]:
    """In a process of its own. What cannot be compiled is left to the launch, which says why."""
    os.dup2(log.fileno(), 2)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        driver.set_active(NamedTarget(sm))
        try:
            launch.compile()
        except Exception:
            return {"compiled": False}
    return {"compiled": True}


def compiler_for(gpu: Gpu) -> Compile:
    """Compiles each kernel once."""
    known: set[Kernel] = set()

    def compile_all(works: Iterable[Callable[[], object]]) -> None:
        with light_launches() as found:
            for work in works:
                work()
        fresh = [launch for kernel, launch in found.items() if kernel not in known]
        known.update(found)
        if len(fresh) < 2 or usable_cores() < 2:
            return  # the launch does it as fast
        warm_up(gpu.sm)
        jobs = [partial(fill_cache, launch, gpu.sm) for launch in fresh]
        with warnings.catch_warnings():
            # Python warns of a fork beside threads, which the driver has; these children take none of their locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            for _ in run_forked(jobs, num_workers=min(len(jobs), usable_cores()), limit_s=LIMIT_S):
                pass

    return compile_all
