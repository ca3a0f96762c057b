"""Barriers in shared memory: threads arrive at them, and others wait until a phase has all its arrivals.

What an arriving warp did before is ordered before what a waiting warp does after. (Of a warp of which some lanes arrive
all lanes count as ordered.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from microscale.prove.interpret.errors import InterpretError, Race
from microscale.prove.interpret.numbers import Array

if TYPE_CHECKING:
    from microscale.prove.interpret.lanes import Lanes


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

    def __init__(self) -> None:
        self._barriers: dict[tuple[int, int], _Barrier] = {}
        self.phases = 0
        """That have ended: when it grows, somebody need not wait any longer."""

    def make(self, lanes: Lanes, addresses: Array, counts: Array, selected: Array) -> None:
        lanes.shared.now += 1
        for lane, address, count in zip(selected, addresses, counts, strict=True):
            clocks = np.zeros(lanes.shared.clocks.shape[-1], np.int64)
            made = _Barrier(int(count), int(count), lanes.shared.now, _warp(lanes, int(lane)), clocks, clocks)
            self._barriers[int(lanes.block[lane]), int(address)] = made

    def arrive(self, lanes: Lanes, addresses: Array, selected: Array) -> None:
        lanes.shared.now += 1
        for block, barrier, chosen in self._grouped(lanes, addresses, selected):
            if len(chosen) > barrier.pending:
                raise InterpretError(
                    f"{lanes.where}: more threads arrive at an mbarrier than the {barrier.count} it has."
                )
            for warp in np.unique(chosen // 32):
                local = int(warp) % lanes.shared.clocks.shape[1]
                barrier.clocks = np.maximum(barrier.clocks, lanes.shared.clocks[block, local])
                barrier.clocks[local] = lanes.shared.now
            barrier.pending -= len(chosen)
            if not barrier.pending:
                barrier.phase += 1
                barrier.pending = barrier.count
                barrier.released = barrier.clocks.copy()
                self.phases += 1

    def passed(self, lanes: Lanes, addresses: Array, parities: Array, selected: Array) -> Array:
        """Which of these lanes find that the phase of their parity has ended."""
        ready = np.zeros(lanes.num, np.bool_)
        parity = np.zeros(lanes.num, np.int64)
        parity[selected] = parities
        lanes.shared.now += 1
        for block, barrier, chosen in self._grouped(lanes, addresses, selected):
            done = chosen[parity[chosen] != barrier.phase & 1]
            ready[done] = True
            for warp in np.unique(done // 32):
                mine = lanes.shared.clocks[block, int(warp) % lanes.shared.clocks.shape[1]]
                np.maximum(mine, barrier.released, out=mine)
        return ready

    def _grouped(self, lanes: Lanes, addresses: Array, selected: Array) -> Iterator[tuple[int, _Barrier, Array]]:
        keys = lanes.block[selected] << 32 | addresses.astype(np.int64)
        for key in np.unique(keys):
            block, address = int(key) >> 32, int(key) & 0xFFFFFFFF
            chosen = selected[keys == key]
            barrier = self._barriers.get((block, address))
            if barrier is None:
                raise InterpretError(f"{lanes.where}: an mbarrier at {address:#x} that nobody has made.")
            for warp in np.unique(chosen // 32):
                local = int(warp) % lanes.shared.clocks.shape[1]
                if local != barrier.made_by and barrier.made_at >= lanes.shared.clocks[block, local, barrier.made_by]:
                    raise Race(f"{lanes.where}: an mbarrier that another thread makes, with no barrier between.")
            yield block, barrier, chosen


def _warp(lanes: Lanes, lane: int) -> int:
    return int(lanes.thread[lane]) // 32
