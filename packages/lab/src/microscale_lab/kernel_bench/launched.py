"""Counts what one call starts: rows keep it, because a fixed time belongs to launches and to waves of programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from microscale.kernels.launch import Launch, taken_by
from microscale_lab.kernel_bench.rows import StartedKernels


@contextmanager
def counting(path: str) -> Iterator[list[StartedKernels]]:
    """Inside, kernels start as usual. Afterwards the list holds what was started, by the path of this name."""
    grids: list[int] = []
    found: list[StartedKernels] = []

    def hear(started: Launch) -> bool:
        grids.append(math.prod(started.grid))
        return True

    with taken_by(hear):
        yield found
    found.append(StartedKernels(path, len(grids), max(grids, default=0)))
