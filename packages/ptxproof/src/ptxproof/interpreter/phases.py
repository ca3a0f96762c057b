"""Barriers in shared memory: threads arrive at them, and others wait until a phase has all its arrivals.

What an arriving warp did before is ordered before what a waiting warp does after. (Of a warp of which some lanes arrive
all lanes count as ordered.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ptxproof.errors import InterpretError, Race
from ptxproof.interpreter.numbers import Array
from ptxproof.interpreter.shared import SharedMemory
from ptxproof.interpreter.threads import Threads


@dataclass
class _Barrier:
    count: int
    pending: int
    made_at: int
    made_by: int
    """A warp of the block."""
    clocks: Array
    """Of all that has arrived in this phase and before."""
    released: Array
    """The clocks when the last phase ended."""
    phase: int = 0


class Mbarriers:
    """All of a run, by block and address."""

    def __init__(self, threads: Threads, shared: SharedMemory) -> None:
        self._threads = threads
        self._shared = shared
        self._barriers: dict[tuple[int, int], _Barrier] = {}
        self.phases = 0
        """Number of phases that have ended: when it grows, some thread no longer has to wait."""

    def make(self, addresses: Array, counts: Array, selected: Array) -> None:
        self._shared.now += 1
        for lane, address, count in zip(selected, addresses, counts, strict=True):
            clocks = np.zeros(self._shared.clocks.shape[-1], np.int64)
            made = _Barrier(
                int(count), int(count), self._shared.now, int(self._threads.thread[lane]) // 32, clocks, clocks
            )
            self._barriers[int(self._threads.block[lane]), int(address)] = made

    def arrive(self, addresses: Array, selected: Array) -> None:
        self._shared.now += 1
        for block, barrier, chosen in self._grouped(addresses, selected):
            if len(chosen) > barrier.pending:
                raise InterpretError(
                    f"{self._threads.where}: more threads arrive at an mbarrier than the {barrier.count} it has."
                )
            for warp in np.unique(chosen // 32):
                local = int(warp) % self._shared.clocks.shape[1]
                barrier.clocks = np.maximum(barrier.clocks, self._shared.clocks[block, local])
                barrier.clocks[local] = self._shared.now
            barrier.pending -= len(chosen)
            if not barrier.pending:
                barrier.phase += 1
                barrier.pending = barrier.count
                barrier.released = barrier.clocks.copy()
                self.phases += 1

    def passed(self, addresses: Array, parities: Array, selected: Array) -> Array:
        """Which of these lanes find that the phase of their parity has ended."""
        ready = np.zeros(self._threads.num, np.bool_)
        parity = np.zeros(self._threads.num, np.int64)
        parity[selected] = parities
        self._shared.now += 1
        for block, barrier, chosen in self._grouped(addresses, selected):
            done = chosen[parity[chosen] != barrier.phase & 1]
            ready[done] = True
            for warp in np.unique(done // 32):
                mine = self._shared.clocks[block, int(warp) % self._shared.clocks.shape[1]]
                np.maximum(mine, barrier.released, out=mine)
        return ready

    def _grouped(self, addresses: Array, selected: Array) -> Iterator[tuple[int, _Barrier, Array]]:
        keys = self._threads.block[selected] << 32 | addresses.astype(np.int64)
        for key in np.unique(keys):
            block, address = int(key) >> 32, int(key) & 0xFFFFFFFF
            chosen = selected[keys == key]
            barrier = self._barriers.get((block, address))
            if barrier is None:
                raise InterpretError(f"{self._threads.where}: an mbarrier at {address:#x} that was never initialised.")
            for warp in np.unique(chosen // 32):
                local = int(warp) % self._shared.clocks.shape[1]
                if local != barrier.made_by and barrier.made_at >= self._shared.clocks[block, local, barrier.made_by]:
                    raise Race(
                        f"{self._threads.where}: an mbarrier that another thread makes, with no barrier between."
                    )
            yield block, barrier, chosen
