"""Shared memory, and the order of what threads do to it.

Time counts accesses and barriers. Each warp has a clock for every warp of its block: what that one did before is
ordered before what this warp does now. A barrier, an mbarrier's phase and ``bar.warp.sync`` (for the warp's own lanes)
set clocks. Two accesses of one cell by two threads, one of them a store, are a race if no clock orders them. A
``cp.async`` stores when its thread has waited for it, and until then no thread may access what it stores to.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxproof.errors import NotInterpreted, Race
from ptxproof.interpreter.memory import GARBAGE, refuse, refuse_different
from ptxproof.interpreter.numbers import UNSIGNED, Array
from ptxproof.interpreter.threads import Threads

_SEVERAL = -1
_UNDER_WAY = 2**31 - 1
"""The time of a read that may not have happened yet."""


class SharedMemory:
    """Each block's own. For every cell of ``grain`` bytes it keeps who wrote and read it last, and when."""

    def __init__(self, threads: Threads, size: int, grain: int) -> None:
        self._threads = threads
        self._size = max(-(-size // 128) * 128, 128)
        self._grain = grain
        self._num_warps = threads.per_block // 32
        self._base = threads.block.astype(np.int64) * self._size
        self._warp = np.arange(threads.num) // 32
        self._local_warp = self._warp % self._num_warps
        self._lane = (np.arange(threads.num) % 32).astype(np.int8)
        self.bytes = np.full(threads.num_blocks * self._size, GARBAGE, np.uint8)
        cells = self.bytes.size // grain
        self.now = 1
        self.clocks = np.zeros((threads.num_blocks, self._num_warps, self._num_warps), np.int64)
        """``[block, warp, other warp]``"""
        self._written = np.zeros(cells, np.int64)
        self._writer = np.zeros(cells, np.int32)
        self._copy = np.full(cells, -1, np.int32)
        """The number of the ``cp.async`` group that wrote a cell; -1: a store."""
        self._atomic = np.zeros(cells, np.bool_)
        """Whether an atomic wrote a cell."""
        self._last_read = np.zeros(cells, np.int64)
        self._read = np.zeros((cells, self._num_warps), np.int32)
        """When each warp read a cell last."""
        self._reader = np.zeros((cells, self._num_warps), np.int8)
        """Which of its lanes did; -1: several."""
        self._committed = np.zeros(threads.num, np.int64)
        self._arrived = np.zeros(threads.num, np.int64)
        """Groups of each lane that it has waited for."""
        self._fenced = np.zeros(threads.num, np.int64)
        self._stored = np.zeros((threads.num, 8), np.int64)
        """When each of a lane's groups was waited for; 0: it is under way."""

    # ---- barriers ----------------------------------------------------------------------------------------------------

    def barrier(self, active: Array | None) -> None:
        """All warps of ``active`` meet the others of their block."""
        self.now += 1
        if active is None:
            self.clocks[:] = self.now
            return
        here: Array = np.any(active.reshape(len(self.clocks), self._num_warps, 32), axis=2)
        known = np.where(here[:, :, None], self.clocks, 0).max(1)
        joined = np.where(here, self.now, known)
        self.clocks = np.where(here[:, :, None], joined[:, None, :], self.clocks)

    def warp_barrier(self, active: Array | None) -> None:
        self.now += 1
        own = np.arange(self._num_warps)
        if active is None:
            self.clocks[:, own, own] = self.now
        else:
            here: Array = np.any(active.reshape(len(self.clocks), self._num_warps, 32), axis=2)
            self.clocks[:, own, own] = np.where(here, self.now, self.clocks[:, own, own])

    def commit(self, active: Array | None) -> None:
        self._committed[slice(None) if active is None else active] += 1
        if int(self._committed.max()) >= self._stored.shape[1]:
            self._stored = np.concatenate([self._stored, np.zeros_like(self._stored)], 1)

    def wait(self, pending: int, active: Array | None) -> None:
        """For all but the last ``pending`` groups of each lane."""
        self.now += 1
        which = np.ones(self._threads.num, np.bool_) if active is None else active
        target = np.where(which, np.maximum(self._committed - pending, self._arrived), self._arrived)
        for group in range(int(self._arrived.min()), int(target.max())):
            self._stored[(self._arrived <= group) & (group < target), group] = self.now
        self._arrived = target

    def copies_arrive(self, selected: Array) -> None:
        """An mbarrier waits for all copies of these lanes so far."""
        if (self._committed[selected] != self._arrived[selected]).any():
            raise NotInterpreted(f"{self._threads.where}: copies of groups and of an mbarrier together.")
        active = np.zeros(self._threads.num, np.bool_)
        active[selected] = True
        self.commit(active)
        self.wait(0, active)

    # ---- accesses ----------------------------------------------------------------------------------------------------

    def places(self, addresses: Array, size: int, selected: Array) -> Array:
        """Bytes of the whole array at which these accesses begin."""
        at = addresses.astype(np.int64)
        wrong = (at < 0) | (at + size > self._size) | (at % size != 0)
        if wrong.any():
            why = f"outside of {self._size} bytes of shared memory or misaligned"
            refuse(self._threads, why, size, addresses, wrong, selected)
        return at + self._base[selected]

    def load(self, addresses: Array, width: int, count: int, selected: Array) -> Array:
        at = self.places(addresses, width * count, selected)
        self.note_read(self._cells(at, width * count), selected)
        loaded: Array = self.bytes.view(UNSIGNED[8 * width]).reshape(-1, count)[at // (width * count)]
        return loaded

    def store(self, addresses: Array, width: int, rows: Array, selected: Array, *, copied: bool = False) -> None:
        size = width * rows.shape[1]
        at = self.places(addresses, size, selected)
        self._note_write(self._cells(at, size), selected, copied)
        stored = self.bytes.view(UNSIGNED[8 * width]).reshape(-1, rows.shape[1])
        stored[at // size] = rows
        refuse_different(self._threads, stored[at // size], rows, selected, "shared")

    def load_chunks(self, addresses: Array, firsts: Array) -> tuple[Array, Array]:
        """16-byte chunks at ``addresses [groups, chunks]`` that all warps of a group read asynchronously; ``firsts``,
        ``[groups, warps]``, are the first lanes of those warps. Gives the chunks, and the cells of each warp, which
        no thread may store to before ``chunks_read``."""
        groups, count = addresses.shape
        at = self.places(addresses.reshape(-1), 16, np.repeat(firsts[:, 0], count))
        cells = np.repeat(self._cells(at, 16).reshape(groups, -1), firsts.shape[1], 0)
        selected = firsts.reshape(-1)
        self.note_read(cells, selected)
        self._check_fenced(cells, selected)
        warps = self._local_warp[selected][:, None]
        self._read[cells, warps] = _UNDER_WAY
        self._reader[cells, warps] = _SEVERAL
        self._last_read[cells] = _UNDER_WAY
        return self.bytes.reshape(-1, 16)[at // 16].reshape(groups, count, 16), cells

    def chunks_read(self, cells: Array, firsts: Array, lanes: Array) -> None:
        """The warps among ``lanes`` have waited for what ``load_chunks`` gave."""
        self.now += 1
        rows = lanes[firsts]
        self._read[cells[rows], self._local_warp[firsts[rows]][:, None]] = self.now

    def fence(self, active: Array | None) -> None:
        """``fence.proxy.async``: stores of these lanes, and what they have seen, are there for asynchronous reads."""
        self.now += 1
        self._fenced[slice(None) if active is None else active] = self.now

    def _check_fenced(self, cells: Array, selected: Array) -> None:
        writers = self._writer[cells]
        groups = np.maximum(self._copy[cells], 0)
        times = np.where(self._copy[cells] >= 0, self._stored[writers, groups], self._written[cells])
        open_ = (self._fenced[writers] < times) & (self._fenced[selected][:, None] < times)
        self._check(open_, "reads asynchronously what was stored with no fence.proxy.async since", cells, selected)

    def atomic_places(self, addresses: Array, size: int, selected: Array) -> Array:
        """For atomics, which race with loads and stores but not with each other."""
        at = self.places(addresses, size, selected)
        self.now += 1
        cells = self._cells(at, size)
        self._check(self._written[cells] == 0, "reads shared memory that was never written", cells, selected)
        clocks = self._clocks_of(selected)
        stored = np.flatnonzero(~self._atomic[cells].all(1))
        self._check_written(cells[stored], selected[stored], clocks[stored], "changes")
        self._check_read(cells, selected, clocks)
        self._written[cells] = self.now
        self._writer[cells] = selected[:, None]
        self._copy[cells] = -1
        self._atomic[cells] = True
        return at // size

    def _cells(self, at: Array, size: int) -> Array:
        first = at // self._grain
        cells: Array = first[:, None] + np.arange(max(1, size // self._grain))
        return cells

    # ---- order -------------------------------------------------------------------------------------------------------

    def _clocks_of(self, selected: Array) -> Array:
        """``[lanes, warps]``"""
        clocks: Array = self.clocks.reshape(-1, self._num_warps)[self._warp[selected]]
        return clocks

    def _check_written(self, cells: Array, selected: Array, clocks: Array, what: str) -> None:
        """Refuse what a copy still writes, and what another thread wrote that nothing orders before."""
        times, writers = self._written[cells], self._writer[cells]
        copied = self._copy[cells] >= 0
        if copied.any():
            groups = np.where(copied, self._copy[cells], 0)
            times = np.where(copied, self._stored[writers, groups], times)
            self._check(
                copied & (times == 0), "touches shared memory that a cp.async is still writing", cells, selected
            )
        seen = np.take_along_axis(clocks, self._local_warp[writers], 1)
        late = (times >= seen) & (times > 0) & (writers != selected[:, None])
        self._check(
            late & copied, "touches shared memory that a cp.async is still writing for all others", cells, selected
        )
        self._check(late, f"{what} what another thread wrote, with no barrier between", cells, selected)

    def note_read(self, cells: Array, selected: Array) -> None:
        self.now += 1
        self._check(self._written[cells] == 0, "reads shared memory that was never written", cells, selected)
        clocks = self._clocks_of(selected)
        self._check_written(cells, selected, clocks, "reads")
        warp, lane = self._local_warp[selected][:, None], self._lane[selected][:, None]
        own = np.take_along_axis(clocks, warp, 1)
        before = self._read[cells, warp]
        several = (before >= own) & (before > 0) & (self._reader[cells, warp] != lane)
        self._reader[cells, warp] = lane
        several |= self._reader[cells, warp] != lane  # two of these lanes read one cell
        if several.any():
            self._reader[cells[several], np.broadcast_to(warp, cells.shape)[several]] = _SEVERAL
        self._read[cells, warp] = self.now
        self._last_read[cells] = self.now

    def _note_write(self, cells: Array, selected: Array, copied: bool) -> None:
        self.now += 1
        clocks = self._clocks_of(selected)
        self._check_written(cells, selected, clocks, "overwrites")
        self._check_read(cells, selected, clocks)
        self._atomic[cells] = False
        self._writer[cells] = selected[:, None]
        self._written[cells] = self.now
        self._copy[cells] = self._committed[selected][:, None] if copied else -1

    def _check_read(self, cells: Array, selected: Array, clocks: Array) -> None:
        """Refuse to change what another thread read that nothing orders before."""
        if not (self._last_read[cells] >= clocks.min(1)[:, None]).any():
            return
        times: Array = self._read[cells]
        late = (times > 0) & (times >= clocks[:, None, :])
        own: Any = self._local_warp[selected][:, None, None]
        alone = np.take_along_axis(self._reader[cells], own, 2) == self._lane[selected][:, None, None]
        np.put_along_axis(late, own, np.take_along_axis(late, own, 2) & ~alone, 2)
        wrong: Array = np.any(late, axis=2)
        self._check(wrong, "overwrites what another thread reads, with no barrier between", cells, selected)

    def _check(self, wrong: Array, what: str, cells: Array, selected: Array) -> None:
        if not wrong.any():
            return
        row, column = np.argwhere(wrong)[0]
        cell = int(cells[row, column])
        byte = cell * self._grain % self._size
        writer = self._threads.name(int(self._writer[cell])) if self._written[cell] else "no thread"
        who = self._threads.name(int(selected[row]))
        raise Race(f"{self._threads.where}: {who} {what}: byte {byte}, written last by {writer}.")
