"""Global, shared and local memory, with the checks that hardware does not make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from microscale.prove.interpret.errors import InterpretError, Race
from microscale.prove.interpret.numbers import UNSIGNED, Array

if TYPE_CHECKING:
    from microscale.prove.interpret.lanes import Lanes

BASE = 0x7F0000000000
"""The address of the first byte of global memory."""
GAP = 4096
"""Bytes between two tensors: an address that leaves one by less than this belongs to none."""
ALIGN = 512
GARBAGE = 0xA5


class GlobalMemory:
    """Tensors, one after the other with gaps between them."""

    def __init__(self) -> None:
        self._contents: list[Array] = []
        self._starts: list[int] = []
        self._size = GAP
        self.bytes = np.empty(0, np.uint8)
        self.valid = np.empty(0, np.bool_)

    def add(self, content: Array) -> int:
        """The address that these bytes will have. They are written back by ``restore``."""
        start = self._size
        self._contents.append(content)
        self._starts.append(start)
        self._size = -(-(start + content.size + GAP) // ALIGN) * ALIGN
        return BASE + start

    def fill(self) -> None:
        self.bytes = np.full(self._size, GARBAGE, np.uint8)
        self.valid = np.zeros(self._size, np.bool_)
        for start, content in zip(self._starts, self._contents, strict=True):
            self.bytes[start : start + content.size] = content
            self.valid[start : start + content.size] = True

    def restore(self) -> None:
        for start, content in zip(self._starts, self._contents, strict=True):
            if content.flags.writeable:
                content[:] = self.bytes[start : start + content.size]

    def places(self, lanes: Lanes, addresses: Array, size: int, selected: Array) -> Array:
        """Where these accesses of ``size`` bytes are, in units of ``size``."""
        at = addresses.astype(np.int64) - BASE
        inside = (at >= 0) & (at + size <= self.bytes.size)
        safe = np.where(inside, at, 0)
        wrong = ~(inside & self.valid[safe] & self.valid[np.minimum(safe + size - 1, self.valid.size - 1)])
        if wrong.any():
            _refuse(lanes, "outside of every tensor", size, addresses, wrong, selected)
        if (at % size).any():
            _refuse(lanes, "misaligned", size, addresses, at % size != 0, selected)
        return at // size

    def rows(self, width: int, count: int) -> Array:
        """Memory as rows of ``count`` numbers of ``width`` bytes."""
        return self.bytes.view(UNSIGNED[8 * width]).reshape(-1, count)


class LocalMemory:
    """Each lane's own."""

    def __init__(self, num_lanes: int, size: int) -> None:
        self._size = max(size, 16)
        self.bytes = np.full(num_lanes * self._size, GARBAGE, np.uint8)

    def places(self, lanes: Lanes, addresses: Array, size: int, selected: Array) -> Array:
        at = addresses.astype(np.int64)
        wrong = (at < 0) | (at + size > self._size) | (at % size != 0)
        if wrong.any():
            _refuse(lanes, "outside of local memory or misaligned", size, addresses, wrong, selected)
        places: Array = (at + selected * self._size) // size
        return places

    def rows(self, width: int, count: int) -> Array:
        return self.bytes.view(UNSIGNED[8 * width]).reshape(-1, count)


class SharedMemory:
    """Each block's own. For every cell it keeps who wrote and read it last, and when.

    Time counts the accesses and barriers. What happened before a lane's last barrier is ordered before what it does
    now; of its own warp, what happened before its last ``bar.warp.sync``. Two accesses of one cell by two threads, one
    of them a store, are a race if nothing orders them.
    """

    def __init__(self, block: Array, thread: Array, size: int, grain: int, lanes: Lanes) -> None:
        self._size = max(-(-size // 128) * 128, 128)
        self._base = block.astype(np.int64) * self._size
        self._lanes = lanes
        self._grain = grain
        self._warp = np.arange(block.size) // 32
        num_blocks = int(block[-1]) + 1
        self.bytes = np.full(num_blocks * self._size, GARBAGE, np.uint8)
        cells = self.bytes.size // grain
        self._now = 1
        self._written = np.zeros(cells, np.int64)
        self._writer = np.zeros(cells, np.int64)
        self._copy = np.full(cells, -1, np.int64)
        """The number of the ``cp.async`` group that wrote a cell; -1: a store."""
        self._read = np.zeros(cells, np.int64)
        self._reader = np.zeros(cells, np.int64)
        """-1: several."""
        self._barrier = np.zeros(block.size, np.int64)
        self._warp_barrier = np.zeros(block.size, np.int64)
        self._committed = np.zeros(block.size, np.int64)
        self._arrived = np.zeros(block.size, np.int64)
        """Groups of each lane that it has waited for."""
        self._visible = np.zeros(block.size, np.int64)
        """Those that a barrier since has shown to the others."""

    # ---- barriers ----------------------------------------------------------------------------------------------------

    def barrier(self, active: Array | None) -> None:
        self._now += 1
        which: Any = slice(None) if active is None else active
        self._barrier[which] = self._warp_barrier[which] = self._now
        self._visible[which] = self._arrived[which]

    def warp_barrier(self, active: Array | None) -> None:
        self._now += 1
        self._warp_barrier[slice(None) if active is None else active] = self._now

    def commit(self, active: Array | None) -> None:
        self._committed[slice(None) if active is None else active] += 1

    def wait(self, pending: int, active: Array | None) -> None:
        which: Any = slice(None) if active is None else active
        self._arrived[which] = np.maximum(self._arrived[which], self._committed[which] - pending)

    # ---- accesses ----------------------------------------------------------------------------------------------------

    def places(self, addresses: Array, size: int, selected: Array) -> Array:
        """Bytes of the whole array at which these accesses begin."""
        at = addresses.astype(np.int64)
        wrong = (at < 0) | (at + size > self._size) | (at % size != 0)
        if wrong.any():
            _refuse(
                self._lanes,
                f"outside of {self._size} bytes of shared memory or misaligned",
                size,
                addresses,
                wrong,
                selected,
            )
        return at + self._base[selected]

    def load(self, addresses: Array, width: int, count: int, selected: Array) -> Array:
        at = self.places(addresses, width * count, selected)
        self._note_read(at, width * count, selected)
        loaded: Array = self.bytes.view(UNSIGNED[8 * width]).reshape(-1, count)[at // (width * count)]
        return loaded

    def store(self, addresses: Array, width: int, rows: Array, selected: Array, *, copied: bool = False) -> None:
        size = width * rows.shape[1]
        at = self.places(addresses, size, selected)
        self._note_write(at, size, selected, copied)
        stored = self.bytes.view(UNSIGNED[8 * width]).reshape(-1, rows.shape[1])
        stored[at // size] = rows
        if (stored[at // size] != rows).any():
            differs = np.flatnonzero((stored[at // size] != rows).any(1))
            who = self._lanes.name(int(selected[differs[0]]))
            raise Race(f"{self._lanes.where}: {who} and another thread store different numbers to one shared address.")

    def atomic_places(self, addresses: Array, size: int, selected: Array) -> Array:
        """For atomics, which do not race with each other."""
        at = self.places(addresses, size, selected)
        cells = self._cells(at, size)
        self._written[cells] = self._now
        self._writer[cells] = selected[:, None]
        self._copy[cells] = -1
        return at // size

    def _cells(self, at: Array, size: int) -> Array:
        first = at // self._grain
        cells: Array = first[:, None] + np.arange(max(1, size // self._grain))
        return cells

    def _unordered(self, times: Array, others: Array, selected: Array) -> Array:
        """Which accesses at ``times`` by ``others`` (-1: several lanes) nothing orders before these lanes."""
        me = selected[:, None]
        late: Array = (times > 0) & (times >= self._barrier[me]) & (others != me)
        if not late.any():
            return late
        same_warp = (others >= 0) & (self._warp[others] == self._warp[me])
        late &= ~(same_warp & (times < self._warp_barrier[me]))
        return late

    def _in_flight(self, cells: Array, selected: Array) -> Array:
        """Which cells a ``cp.async`` wrote; refuses those that may not have arrived."""
        copied = self._copy[cells] >= 0
        if copied.any():
            writer = self._writer[cells]
            arrived = np.where(writer == selected[:, None], self._arrived[writer], self._visible[writer])
            early = copied & (self._copy[cells] >= arrived)
            self._check(early, "touches shared memory that a cp.async is still writing", cells, selected)
        return copied

    def _note_read(self, at: Array, size: int, selected: Array) -> None:
        self._now += 1
        cells = self._cells(at, size)
        self._check(self._written[cells] == 0, "reads shared memory that nobody wrote", cells, selected)
        copied = self._in_flight(cells, selected)
        early = self._unordered(self._written[cells], self._writer[cells], selected) & ~copied
        self._check(early, "reads what another thread wrote, with no barrier between", cells, selected)
        me = np.broadcast_to(selected[:, None], cells.shape)
        several = (self._read[cells] >= self._barrier[me]) & (self._read[cells] > 0) & (self._reader[cells] != me)
        self._reader[cells] = me
        several |= self._reader[cells] != me  # two of these lanes read one cell
        self._reader[cells[several]] = -1
        self._read[cells] = self._now

    def _note_write(self, at: Array, size: int, selected: Array, copied: bool) -> None:
        self._now += 1
        cells = self._cells(at, size)
        in_flight = self._in_flight(cells, selected)
        early = self._unordered(self._read[cells], self._reader[cells], selected)
        self._check(early, "overwrites what another thread reads, with no barrier between", cells, selected)
        early = self._unordered(self._written[cells], self._writer[cells], selected) & ~in_flight
        self._check(early, "overwrites what another thread wrote, with no barrier between", cells, selected)
        self._writer[cells] = selected[:, None]
        self._written[cells] = self._now
        self._copy[cells] = self._committed[selected][:, None] if copied else -1

    def _check(self, wrong: Array, what: str, cells: Array, selected: Array) -> None:
        if not wrong.any():
            return
        row, column = np.argwhere(wrong)[0]
        cell = int(cells[row, column])
        byte = cell * self._grain % self._size
        writer = self._lanes.name(int(self._writer[cell])) if self._written[cell] else "nobody"
        who = self._lanes.name(int(selected[row]))
        raise Race(f"{self._lanes.where}: {who} {what}: byte {byte}, written last by {writer}.")


def _refuse(lanes: Lanes, why: str, size: int, addresses: Array, wrong: Array, selected: Array) -> None:
    first = int(np.flatnonzero(wrong)[0])
    who = lanes.name(int(selected[first]))
    raise InterpretError(f"{lanes.where}: {who} accesses {size} bytes at {int(addresses[first]):#x}, {why}.")
