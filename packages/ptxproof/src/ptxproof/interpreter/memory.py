"""Global and local memory, with the checks that hardware does not make."""

from __future__ import annotations

import numpy as np

from ptxproof.errors import InterpretError, NotInterpreted, Race
from ptxproof.interpreter.dependent import SPARSE, Order
from ptxproof.interpreter.numbers import UNSIGNED, Array
from ptxproof.interpreter.threads import Threads
from ptxproof.interpreter.visible import Visibility

BASE = 0x100000000000
"""The address below all tensors."""
SPAN_BITS = 36
"""Each tensor has a range of ``2**SPAN_BITS`` addresses of its own and lies in the middle of it, so an address outside
of the tensor is not inside of another one."""
_MIDDLE = 1 << (SPAN_BITS - 1)
WINDOW_BITS = 40
WINDOWS = {"local": 1, "shared": 2}
"""Which window of ``2**WINDOW_BITS`` generic addresses a memory has, below all tensors."""
ALIGN = 512
PAGE_BITS = 12
_SPARSE_AT = 1 << 50
"""Where in ``bytes`` such memory would be, if it were there."""
_SPARSE_PAGES = 2048
"""Of them, that one launch may touch."""
GARBAGE = 0xA5


class GlobalMemory:
    """Tensors by their addresses. Two that share storage have different addresses and the same bytes."""

    def __init__(self) -> None:
        self._contents: list[Array] = []
        self._starts: dict[int, int] = {}
        self._size = ALIGN
        self._tensors: list[tuple[int, int, int]] = []
        self.bytes = np.empty(0, np.uint8)
        self._places = self._firsts = self._ends = np.empty(0, np.int64)
        self.order: Order | None = None
        self.visible = Visibility(0, 1, 0, 1)
        self.changes = 0
        """How often a program has changed something."""
        self._sparse: list[Array] = []
        self._slots: dict[int, int] = {}
        """Of pages of sparse memory that were touched: their places in ``bytes``."""

    def add(self, content: Array, first: int = 0, end: int | None = None) -> int:
        """The address of byte ``first`` of these bytes; only those from there up to ``end`` are the tensor's. They are
        written back by ``restore``."""
        key = content.__array_interface__["data"][0] if content.size else -1 - len(self._contents)
        if content.size > SPARSE and key not in self._starts:
            self._starts[key] = _SPARSE_AT + (len(self._sparse) << SPAN_BITS)
            self._sparse.append(content)
        elif key not in self._starts:
            self._starts[key] = self._size
            self._contents.append(content)
            self._size += -(-(content.size + 1) // ALIGN) * ALIGN
        self._tensors.append((self._starts[key], first, content.size if end is None else end))
        return BASE + (len(self._tensors) << SPAN_BITS) + _MIDDLE + first

    def fill(self, grain: int = 1, num_blocks: int = 1, per_block: int = 32) -> None:
        """``grain``: stores are of that many bytes or more."""
        size = self._size + (_SPARSE_PAGES << PAGE_BITS if self._sparse else 0)
        self.visible = Visibility(size, grain, num_blocks, per_block)
        self.bytes = np.full(size, GARBAGE, np.uint8)
        for start, content in self.storages().values():
            self.bytes[start : start + content.size] = content
        table = np.array([(0, 0, 0), *self._tensors], np.int64)  # nothing has the number 0
        self._places, self._firsts, self._ends = (np.ascontiguousarray(column) for column in table.T)

    def restore(self) -> None:
        for start, content in self.storages().values():
            if content.flags.writeable:
                content[:] = self.bytes[start : start + content.size]
        for page, slot in self._slots.items():
            part = self._page(page)
            if part.flags.writeable:
                part[:] = self.bytes[slot : slot + part.size]

    def places(self, threads: Threads, addresses: Array, size: int, selected: Array) -> Array:
        """Where these accesses of ``size`` bytes are, in units of ``size``."""
        at = addresses.astype(np.int64) - BASE
        tensor = at >> SPAN_BITS
        known = (tensor >= 0) & (tensor < len(self._places))
        tensor = np.where(known, tensor, 0)
        offset = (at & ((1 << SPAN_BITS) - 1)) - _MIDDLE
        wrong = (offset < self._firsts[tensor]) | (offset + size > self._ends[tensor])
        if wrong.any():
            refuse(threads, "outside of its tensor", size, addresses, wrong, selected)
        real: Array = self._places[tensor] + offset
        if self._sparse:
            real = self._resident(real)
        if (real % size).any():
            refuse(threads, "misaligned", size, addresses, real % size != 0, selected)
        return real // size

    def _resident(self, at: Array) -> Array:
        """The places of these bytes, of which those of sparse memory are brought first."""
        far = at >= _SPARSE_AT
        for page in np.unique(at[far] >> PAGE_BITS).tolist():
            if page not in self._slots:
                if len(self._slots) == _SPARSE_PAGES:
                    raise NotInterpreted(f"a launch that touches more than {_SPARSE_PAGES} pages of large tensors.")
                slot = self._slots[page] = self._size + (len(self._slots) << PAGE_BITS)
                part = self._page(page)
                self.bytes[slot : slot + part.size] = part
        slots = [self._slots[page] for page in (at[far] >> PAGE_BITS).tolist()]
        found = at.copy()
        found[far] = np.array(slots, np.int64) + (at[far] & ((1 << PAGE_BITS) - 1))
        return found

    def _page(self, page: int) -> Array:
        number, offset = divmod((page << PAGE_BITS) - _SPARSE_AT, 1 << SPAN_BITS)
        return self._sparse[number][offset : offset + (1 << PAGE_BITS)]

    def rows(self, width: int, count: int) -> Array:
        """Memory as rows of ``count`` numbers of ``width`` bytes."""
        size = width * count
        whole = self.bytes[: self.bytes.size // size * size]
        return whole.view(UNSIGNED[8 * width]).reshape(-1, count)

    def storages(self) -> dict[int, tuple[int, Array]]:
        """The bytes behind the tensors by their address on this machine, each with its place in ``bytes``; sparse ones
        left out."""
        dense = ((key, start) for key, start in self._starts.items() if start < _SPARSE_AT)
        return {key: (start, content) for (key, start), content in zip(dense, self._contents, strict=True)}

    def accessed(
        self, threads: Threads, addresses: Array, width: int, count: int, selected: Array, *, writes: bool
    ) -> Array:
        """``places`` of an access, which is held against those of other launches."""
        places = self.places(threads, addresses, width * count, selected)
        if self.order is not None:
            self.order.access(threads, places, width, count, selected, writes=writes)
        return places

    def look(self, threads: Threads, addresses: Array, width: int, selected: Array, *, acquires: bool) -> Array:
        """Load a number that another program may be about to change by an atomic."""
        places = self.accessed(threads, addresses, width, 1, selected, writes=False)
        self.visible.look(threads, places * width, width, selected, acquires=acquires)
        return self.rows(width, 1)[places]

    def load(self, threads: Threads, addresses: Array, width: int, count: int, selected: Array) -> Array:
        places = self.accessed(threads, addresses, width, count, selected, writes=False)
        self.visible.load(threads, places * (width * count), width * count, selected)
        loaded: Array = self.rows(width, count)[places]
        return loaded

    def store(self, threads: Threads, addresses: Array, width: int, rows: Array, selected: Array) -> None:
        places = self.accessed(threads, addresses, width, rows.shape[1], selected, writes=True)
        stored = self.rows(width, rows.shape[1])
        size = width * rows.shape[1]
        changed = (stored[places] != rows).any(1)
        self.changes += bool(changed.any())
        self.visible.store(threads, places * size, size, selected, changed)
        stored[places] = rows
        refuse_different(threads, stored[places], rows, selected, "global")


class LocalMemory:
    """Each lane's own."""

    def __init__(self, num_lanes: int, size: int) -> None:
        self._size = max(size, 16)
        self.bytes = np.full(num_lanes * self._size, GARBAGE, np.uint8)

    def _places(self, threads: Threads, addresses: Array, size: int, selected: Array) -> Array:
        at = addresses.astype(np.int64)
        wrong = (at < 0) | (at + size > self._size) | (at % size != 0)
        if wrong.any():
            refuse(threads, "outside of local memory or misaligned", size, addresses, wrong, selected)
        places: Array = (at + selected * self._size) // size
        return places

    def _rows(self, width: int, count: int) -> Array:
        return self.bytes.view(UNSIGNED[8 * width]).reshape(-1, count)

    def load(self, threads: Threads, addresses: Array, width: int, count: int, selected: Array) -> Array:
        loaded: Array = self._rows(width, count)[self._places(threads, addresses, width * count, selected)]
        return loaded

    def store(self, threads: Threads, addresses: Array, width: int, rows: Array, selected: Array) -> None:
        places = self._places(threads, addresses, width * rows.shape[1], selected)
        self._rows(width, rows.shape[1])[places] = rows


def refuse(threads: Threads, why: str, size: int, addresses: Array, wrong: Array, selected: Array) -> None:
    first = int(np.flatnonzero(wrong)[0])
    who = threads.name(int(selected[first]))
    raise InterpretError(f"{threads.where}: {who} accesses {size} bytes at {int(addresses[first]):#x}, {why}.")


def refuse_different(threads: Threads, found: Array, rows: Array, selected: Array, kind: str) -> None:
    """Stop if what was stored is not what lies there now: then two lanes of one instruction stored different bits to
    one address, and which of them stays is undefined. Replicas of one number may be stored by many."""
    different = (found != rows).any(1)
    if different.any():
        who = threads.name(int(selected[np.flatnonzero(different)[0]]))
        raise Race(f"{threads.where}: {who} and another thread store different numbers to one {kind} address.")
