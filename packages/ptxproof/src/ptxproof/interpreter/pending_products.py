"""Products of ``wgmma`` that are under way: which registers and which shared memory they still use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ptxproof.errors import InterpretError
from ptxproof.interpreter.numbers import Array
from ptxproof.interpreter.shared import SharedMemory

_WARP = 32


@dataclass
class PendingProduct:
    """One product."""

    written: frozenset[int]
    """Registers that it writes."""
    read: frozenset[int]
    """Registers that it reads."""
    lanes: Array
    """Those that have not waited for it."""
    groups: Array
    """By warp: which of its groups this product belongs to."""
    reads: tuple[tuple[Array, Array], ...]
    """Cells of shared memory ``[warps, cells]``, and each warp's first lane."""


class Products:
    """All of a run."""

    def __init__(self, num_warps: int, registers: frozenset[int]) -> None:
        """``registers``: those that any product of the program uses."""
        self._registers = registers
        self._committed = np.zeros(num_warps, np.int64)
        self._pending: list[PendingProduct] = []
        self._reads: list[tuple[Array, Array]] = []
        self._written: frozenset[int] = frozenset()
        self._read: frozenset[int] = frozenset()
        self._inside = False
        self._changed: dict[int, Array | None] = {}
        """Registers that were written since the last ``wgmma.fence``, and in which lanes; ``None``: in all. Groups of
        warps fence for themselves."""

    @contextmanager
    def begun(self, written: frozenset[int], read: frozenset[int], active: Array | None) -> Iterator[None]:
        """Inside, a product takes its operands and stores its result: it may follow one that is under way in the same
        registers."""
        self._written, self._read, self._reads = written, read, []
        for place in self._changed.keys() & (written | read):
            lanes = self._changed[place]
            if active is None or lanes is None or (lanes & active).any():
                raise InterpretError("a wgmma whose registers were written with no wgmma.fence since.")
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def load(self, shared: SharedMemory, addresses: Array, groups: Array) -> Array:
        """Chunks at ``addresses [groups, chunks]`` for ``groups [groups, 4]`` of warps, ``[groups, chunks, 16]``."""
        firsts = groups * _WARP
        chunks, cells = shared.load_chunks(addresses, firsts)
        self._reads.append((cells, firsts.reshape(-1)))
        return chunks

    def under_way(self, num_lanes: int, warps: Array) -> None:
        lanes = np.zeros(num_lanes, np.bool_)
        lanes.reshape(-1, _WARP)[warps] = True
        self._pending.append(
            PendingProduct(self._written, self._read, lanes, self._committed.copy(), tuple(self._reads))
        )

    def commit(self, warps: Array) -> None:
        self._committed[warps] += 1

    def wait(self, shared: SharedMemory, pending: int, warps: Array) -> None:
        """These warps wait for all but their last ``pending`` groups."""
        waiting = np.zeros(len(self._committed), np.bool_)
        waiting[warps] = True
        for product in self._pending:
            here = np.repeat(waiting & (product.groups < self._committed - pending), _WARP) & product.lanes
            if here.any():
                for cells, firsts in product.reads:
                    shared.chunks_read(cells, firsts, here)
                product.lanes &= ~here
        self._pending = [product for product in self._pending if product.lanes.any()]

    def fence(self, active: Array | None) -> None:
        before, self._changed = self._changed, {}
        if active is not None:
            for place, lanes in before.items():
                left = ~active if lanes is None else lanes & ~active
                if left.any():
                    self._changed[place] = left

    def changed(self, place: int, active: Array | None) -> None:
        """A register is written, by a product or by another instruction."""
        if self._inside or place not in self._registers:
            return
        before = self._changed.get(place, active)
        self._changed[place] = None if before is None or active is None else before | active

    def using(self, place: int, active: Array | None, *, writing: bool) -> bool:
        """Whether a register is still used by a product of an active lane."""
        if not self._pending or self._inside:
            return False
        return any(
            (place in product.written or (writing and place in product.read))
            and bool((product.lanes if active is None else product.lanes & active).any())
            for product in self._pending
        )
