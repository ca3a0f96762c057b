"""One rank's part of a tensor, as ranges of its file, and how the part is put together from what was read.

A part is one or more pieces of an axis, each followed by zeros up to its size. What a rank needs of the first axis, or
of one whose runs in the file are long, is read and nothing else. Runs shorter than ``LEAST_RUN`` are read as they lie,
with what is between them, a few rows at a time: a disk reads whole blocks anyway.

    o_proj [hidden, heads * 64]   rank 1 of 2:  ....####  runs of 4 KB in rows of 8 KB: read all, keep half
    gate_up [E, 2I, H / 32, 16]   rank 1 of 2:  ....####  one run of 2 MB in each expert: read that
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from microscale.models.safetensors_header import DTYPE_BYTES, TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

LEAST_RUN = 1 << 16
"""Bytes of a run that is worth a read of its own. Direct reads take whole blocks of 4096 bytes at both ends."""
SLAB = 8 << 20
"""Bytes that are read at a time of a tensor of which only short runs are kept."""


@dataclass(frozen=True)
class AxisPiece:
    """``[begin, end)`` of an axis, then zeros up to ``size``."""

    begin: int
    end: int
    size: int


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a tensor: pieces of one axis, one after the other."""

    axis: int
    pieces: tuple[AxisPiece, ...]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True)
class Range:
    """One read: an entry of its own, which of its numbers are kept, and where they belong."""

    entry: TensorEntry
    rows: tuple[int, int]
    """The rows of the part that the read fills."""
    within: tuple[tuple[AxisPiece, int], ...]
    """Pieces of the part's axis, with their places in it; empty if all of the read belongs to ``rows``."""
    index: int | None = None
    """The index of the first axis of which a run is read; the entry then lacks that axis."""


def part_shape(entry: TensorEntry, part: RankPart) -> tuple[int, ...]:
    return (*entry.shape[: part.axis], part.size, *entry.shape[part.axis + 1 :])


def ranges(entry: TensorEntry, part: RankPart) -> list[Range]:
    """All that must be read for a part, in the order of the file."""
    reads = _of_first_axis(entry, part) if part.axis == 0 else _of_later_axis(entry, part)
    return [_named(entry, place, read) for place, read in enumerate(reads)]


def _named(entry: TensorEntry, place: int, read: Range) -> Range:
    """Give each read a name of its own, with the tensor's name at its end: that distinguishes scales from weights."""
    return replace(read, entry=replace(read.entry, name=f"range {place} of {entry.name}"))


def _of_first_axis(entry: TensorEntry, part: RankPart) -> Iterator[Range]:
    place = 0
    for piece in part.pieces:
        if piece.end > piece.begin:
            rows = (place, place + piece.end - piece.begin)
            yield Range(_rows(entry, piece.begin, piece.end), rows, ())
        place += piece.size


def _of_later_axis(entry: TensorEntry, part: RankPart) -> Iterator[Range]:
    places = [sum(piece.size for piece in part.pieces[:at]) for at in range(len(part.pieces))]
    kept = tuple((p, place) for p, place in zip(part.pieces, places, strict=True) if p.end > p.begin)
    if not kept:
        return
    run = min(p.end - p.begin for p, _ in kept) * _step(entry, part.axis)
    if part.axis == 1 and run >= LEAST_RUN:
        for index in range(entry.shape[0]):
            inner = _rows(entry, index, index + 1)
            inner = replace(inner, shape=entry.shape[1:])
            for piece, place in kept:
                at = AxisPiece(0, piece.end - piece.begin, piece.size)
                yield Range(_rows(inner, piece.begin, piece.end), (index, index + 1), ((at, place),), index)
        return
    rows = max(1, SLAB // max(_step(entry, 0), 1))
    for first in range(0, entry.shape[0], rows):
        last = min(first + rows, entry.shape[0])
        yield Range(_rows(entry, first, last), (first, last), kept)


def _step(entry: TensorEntry, axis: int) -> int:
    """Bytes from one index of an axis to the next."""
    return math.prod(entry.shape[axis + 1 :]) * DTYPE_BYTES[entry.dtype]


def _rows(entry: TensorEntry, first: int, last: int) -> TensorEntry:
    step = _step(entry, 0)
    shape = (last - first, *entry.shape[1:])
    return replace(entry, shape=shape, begin=entry.begin + first * step, end=entry.begin + last * step)


class PartAssembly:
    """Puts a part together: ranges go in, the tensor comes out."""

    def __init__(self, entry: TensorEntry, part: RankPart, dtype: torch.dtype, device: torch.device | str) -> None:
        self._axis = part.axis
        shape = part_shape(entry, part)
        whole = all(piece.size == piece.end - piece.begin for piece in part.pieces)
        # Bytes are zeros in every type, and copying FP8 by its bytes works on every device.
        self._dtype = dtype
        self._bytes = dtype.itemsize == 1
        make = torch.empty if whole else torch.zeros
        self._whole = make(shape, dtype=torch.uint8 if self._bytes else dtype, device=device)

    def add(self, read: Range, data: Tensor) -> None:
        if self._bytes:
            data = data.view(torch.uint8)
        first, last = read.rows
        if not read.within:
            self._whole[first:last] = data
            return
        for piece, place in read.within:
            count = piece.end - piece.begin
            if read.index is not None:
                self._whole[read.index, place : place + count] = data
            else:
                target = self._whole[first:last].narrow(self._axis, place, count)
                target.copy_(data.narrow(self._axis, piece.begin, count))

    def done(self) -> Tensor:
        return self._whole.view(self._dtype)
