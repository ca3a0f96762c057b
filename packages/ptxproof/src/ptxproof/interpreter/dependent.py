"""Programmatic dependent launch: a kernel may begin while those before it still run. Until it has waited for them
(``griddepcontrol.wait``) it may neither read what they write nor write what they touch.

The interpreter runs one launch after the other, so the numbers come out right in any case. What is checked is what the
program orders. A wait counts for the thread and, behind a barrier, for its block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptxproof.errors import Race
from ptxproof.interpreter.numbers import UNSIGNED, Array
from ptxproof.interpreter.threads import Threads

SPARSE = 1 << 30
"""Memory of more bytes is copied page by page, where a kernel touches it, for offsets that pass 32 bits. It is not held
against other launches."""


def storage_bytes(x: Tensor) -> Array:
    """All bytes of the memory that ``x`` is a part of."""
    whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    return whole.numpy() if whole.numel() else np.empty(0, np.uint8)


def byte_range(x: Tensor) -> tuple[int, int]:
    """Where in ``storage_bytes`` its first and behind its last number are."""
    first, width = int(x.storage_offset()), x.element_size()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return first * width, (first + last + 1 if x.numel() else first) * width


@dataclass
class _Touched:
    """For each byte of a piece of memory whether it was written and whether it was read: 0 or 255."""

    written: Array
    read: Array

    @classmethod
    def nothing(cls, size: int) -> _Touched:
        return cls(np.zeros(size, np.uint8), np.zeros(size, np.uint8))

    def add(self, other: _Touched, start: int = 0) -> None:
        for mine, more in ((self.written, other.written), (self.read, other.read)):
            mine[start : start + more.size] |= more

    def part(self, start: int, size: int) -> _Touched:
        return _Touched(self.written[start : start + size], self.read[start : start + size])


@dataclass
class _Storage:
    content: Array
    """Kept, so that nothing else gets its address."""
    running: _Touched
    """By launches for which the next one's wait waits."""
    unwaited: _Touched
    """By launches that are before one that did not wait for them."""


@dataclass
class Chain:
    """The launches so far, each of which may still run when the next begins."""

    _storages: dict[int, _Storage] = field(default_factory=dict)

    def precede(self, x: Tensor) -> None:
        """As if a launch before had written ``x`` and still ran: what a case begins with, its kernels find written."""
        content = storage_bytes(x)
        if not 0 < content.size <= SPARSE:
            return
        nothing = (_Touched.nothing(content.size) for _ in range(2))
        storage = self._storages.setdefault(content.__array_interface__["data"][0], _Storage(content, *nothing))
        first, end = byte_range(x)
        storage.running.written[first:end] = np.iinfo(np.uint8).max

    def begin(self, places: dict[int, tuple[int, Array]], size: int, *, dependent: bool) -> Order:
        """``places``: storages by their address, each with where it begins in the memory of the launch, of ``size``
        bytes. A launch that is not ``dependent`` begins after all before it."""
        if not dependent:
            self._storages.clear()
        order = Order(size, places)
        for key, (start, _) in places.items():
            if key in self._storages:
                order.before_wait.add(self._storages[key].running, start)
                order.after_wait.add(self._storages[key].unwaited, start)
        return order

    def end(self, order: Order) -> None:
        for storage in self._storages.values():
            if not order.all_waited:
                storage.unwaited.add(storage.running)
            if order.all_waited and order.released_late:
                storage.running = _Touched.nothing(storage.content.size)
        for key, (start, content) in order.places.items():
            if content.size:
                nothing = (_Touched.nothing(content.size) for _ in range(2))
                storage = self._storages.setdefault(key, _Storage(content, *nothing))
                storage.running.add(order.touched.part(start, content.size))


class Order:
    """What one launch may not touch yet, and what it has touched."""

    def __init__(self, size: int, places: dict[int, tuple[int, Array]]) -> None:
        self.places = places
        self.before_wait, self.after_wait, self.touched = (_Touched.nothing(size) for _ in range(3))
        self.all_waited = True
        self.released_late = False
        """Some block let the next launch begin only after it had waited itself: all blocks must, before that begins."""

    def access(self, threads: Threads, rows: Array, width: int, count: int, selected: Array, *, writes: bool) -> None:
        """Note an access to these rows of ``count`` numbers of ``width`` bytes; stop if it comes too early."""
        waited = threads.waited[selected]
        for forbidden, concerned in ((self.before_wait, ~waited), (self.after_wait, waited)):
            wrong = _rows(forbidden.written, width, count)[rows].any(1) & concerned
            if writes:
                wrong |= _rows(forbidden.read, width, count)[rows].any(1) & concerned
            if wrong.any():
                who = threads.name(int(selected[np.flatnonzero(wrong)[0]]))
                what = "writes what a launch before it touches" if writes else "reads what a launch before it writes"
                raise Race(f"{threads.where}: {who} {what}, and nothing has waited for that launch.")
        flags = self.touched.written if writes else self.touched.read
        kind: Any = UNSIGNED[8 * width]
        _rows(flags, width, count)[rows] = np.iinfo(kind).max


def _rows(flags: Array, width: int, count: int) -> Array:
    size = width * count
    return flags[: flags.size // size * size].view(UNSIGNED[8 * width]).reshape(-1, count)
