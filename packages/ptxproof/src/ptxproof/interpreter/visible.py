"""Global memory within one launch: what a thread reads, another one may have written, and something must order the two.

Within a block a barrier does. From block to block an atomic does that releases, on whose address another block's atomic
or load acquires: it passes on what its own thread has written, what its block had written before the last barrier that
it came by, and what it knows from other blocks. A relaxed atomic passes on nothing. Behind a barrier the whole block
knows what one of its threads has acquired.

Time counts stores, atomics and barriers. A load is held against the stores before it, and a store against those too,
unless it changes nothing. That a store comes too early for a load of another thread is not noticed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ptxproof.errors import Race
from ptxproof.interpreter.numbers import Array
from ptxproof.interpreter.threads import Threads

_PAGE_BITS = 9
"""Most loads are of pages to which nothing was stored, and need no other look."""


@dataclass
class _Known:
    """Of each block the time up to which its stores are visible, and the same of single threads."""

    blocks: Array
    threads: dict[int, int] = field(default_factory=dict)

    def add(self, other: _Known | None) -> None:
        if other is not None:
            np.maximum(self.blocks, other.blocks, out=self.blocks)
            for thread, time in other.threads.items():
                self.threads[thread] = max(time, self.threads.get(thread, 0))

    def has(self, thread: int, block: int, time: int) -> bool:
        return bool(self.blocks[block] > time) or self.threads.get(thread, 0) > time


class Visibility:
    """Of one launch. Threads and blocks are numbered through its whole grid, cells are ``grain`` bytes."""

    def __init__(self, size: int, grain: int, num_blocks: int, per_block: int) -> None:
        cells = -(-size // grain)
        self._grain, self._num_blocks, self._per_block = grain, num_blocks, per_block
        self._stored_to = np.zeros((size >> _PAGE_BITS) + 1, np.bool_)
        self._written = np.zeros(cells, np.int32)
        """When; 0: never."""
        self._writer = np.zeros(cells, np.int32)
        self._atomic = np.zeros(cells, np.bool_)
        self._met = np.zeros(num_blocks * per_block, np.int32)
        """When each thread came by its last barrier."""
        self._warp_met = np.zeros(num_blocks * per_block, np.int32)
        self._released: dict[int, _Known] = {}
        """By cell, what atomics have released there."""
        self._by_thread: dict[int, _Known] = {}
        self._by_block: dict[int, _Known] = {}
        self._now = 1

    # ---- what orders -------------------------------------------------------------------------------------------------

    def barrier(self, threads: Threads, active: Array | None) -> None:
        self._now += 1
        first = threads.first_block * self._per_block
        here = slice(first, first + threads.num) if active is None else first + np.flatnonzero(active)
        self._met[here] = self._now
        concerned = (
            set(np.arange(here.start, here.stop) if isinstance(here, slice) else here) if self._by_thread else ()
        )
        for thread in [thread for thread in self._by_thread if thread in concerned]:
            block = thread // self._per_block
            self._by_block.setdefault(block, self._nothing()).add(self._by_thread.pop(thread))

    def warp_barrier(self, threads: Threads, active: Array | None) -> None:
        self._now += 1
        first = threads.first_block * self._per_block
        here = slice(first, first + threads.num) if active is None else first + np.flatnonzero(active)
        self._warp_met[here] = self._now

    def _nothing(self) -> _Known:
        return _Known(np.zeros(self._num_blocks, np.int32))

    # ---- accesses ----------------------------------------------------------------------------------------------------

    def load(self, threads: Threads, starts: Array, size: int, selected: Array) -> None:
        """``starts``: the first byte of each access of ``size`` bytes."""
        if self._stored_to[starts >> _PAGE_BITS].any():
            self._check(threads, self._cells(starts, size), selected, "reads")

    def store(self, threads: Threads, starts: Array, size: int, selected: Array, changes: Array) -> None:
        """``changes``: which accesses change bits."""
        self._now += 1
        cells = self._cells(starts, size)
        if changes.any() and self._stored_to[starts[changes] >> _PAGE_BITS].any():
            self._check(threads, cells[changes], selected[changes], "overwrites")
        for cell in self._released.keys() & set(cells.reshape(-1).tolist()) if self._released else ():
            del self._released[cell]
        self._note(threads, starts, cells, selected, atomic=False)

    def atomic(
        self, threads: Threads, starts: Array, size: int, selected: Array, *, releases: bool, acquires: bool
    ) -> None:
        """One lane after the other, in order."""
        cells = self._cells(starts, size)
        plain = ~self._atomic[cells].all(1)
        if plain.any():
            self._check(threads, cells[plain], selected[plain], "changes")
        for cell, lane in zip(cells[:, 0].tolist(), selected.tolist(), strict=True) if releases or acquires else ():
            self._now += 1
            thread = threads.first_block * self._per_block + lane
            block = thread // self._per_block
            known = self._nothing()
            known.add(self._released.get(cell) if acquires else None)
            known.add(self._by_thread.get(thread))
            self._by_thread[thread] = known
            if releases:
                passed = self._released.setdefault(cell, self._nothing())
                passed.add(known)
                passed.add(self._by_block.get(block))
                passed.blocks[block] = max(passed.blocks[block], self._met[thread])
                passed.threads[thread] = self._now
        self._now += 1
        self._note(threads, starts, cells, selected, atomic=True)

    def look(self, threads: Threads, starts: Array, size: int, selected: Array, *, acquires: bool) -> None:
        """A load of what atomics change: nothing need order the two, and it may acquire what they have released."""
        cells = self._cells(starts, size)
        plain = ~self._atomic[cells].all(1)
        if plain.any():
            self._check(threads, cells[plain], selected[plain], "reads")
        for cell, lane in zip(cells[:, 0].tolist(), selected.tolist(), strict=True) if acquires else ():
            if cell in self._released:
                thread = threads.first_block * self._per_block + lane
                self._by_thread.setdefault(thread, self._nothing()).add(self._released[cell])

    def _cells(self, starts: Array, size: int) -> Array:
        cells: Array = (starts // self._grain)[:, None] + np.arange(max(1, size // self._grain))
        return cells

    def _note(self, threads: Threads, starts: Array, cells: Array, selected: Array, *, atomic: bool) -> None:
        self._stored_to[starts >> _PAGE_BITS] = True
        self._written[cells] = self._now
        self._writer[cells] = (threads.first_block * self._per_block + selected)[:, None]
        self._atomic[cells] = atomic

    def _check(self, threads: Threads, cells: Array, selected: Array, what: str) -> None:
        """Refuse an access to what another thread has written, if nothing orders the two."""
        me = (threads.first_block * self._per_block + selected)[:, None]
        rows, columns = np.nonzero((self._written[cells] > 0) & (self._writer[cells] != me))
        if not rows.size:
            return
        reader, cell = me[rows, 0], cells[rows, columns]
        writer, time = self._writer[cell], self._written[cell]
        block, other = reader // self._per_block, writer // self._per_block
        same_warp = (reader // 32 == writer // 32) & (np.minimum(self._warp_met[reader], self._warp_met[writer]) > time)
        met = (block == other) & (np.minimum(self._met[reader], self._met[writer]) > time)
        ordered = met | same_warp
        for mine in np.unique(block[~ordered]):
            if (known := self._by_block.get(int(mine))) is not None:
                ordered |= (block == mine) & (known.blocks[other] > time)
        for number in np.flatnonzero(~ordered):
            of = int(reader[number]), int(block[number]), int(writer[number]), int(other[number]), int(time[number])
            if not self._ordered(*of):
                mine, its = (f"thread {t % self._per_block} of block {t // self._per_block}" for t in (of[0], of[2]))
                raise Race(f"{threads.where}: {mine} {what} what {its} wrote, and nothing orders the two.")

    def _ordered(self, reader: int, block: int, writer: int, other: int, time: int) -> bool:
        known = (self._by_block.get(block), self._by_thread.get(reader))
        return any(each.has(writer, other, time) for each in known if each is not None)
