"""Cuts tensors into ranges of a file that are read at once.

Tensors that follow each other in the file are read together, in ranges that end at multiples of a read's bytes in the
file: so reads are large and go through the file in its order, also where a checkpoint has each expert apart in ten
thousands of tensors. What is read in place, straight to its tensor, is read alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from microscale.models.reading.file import BLOCK
from microscale.models.safetensors_header import TensorEntry

MIB = 1 << 20
SMALL = 1 << 20
"""Tensors below this many bytes are never read in place."""
SORTED = 256 << 20
"""Within this many bytes the order follows the file and not the model, so that neighbours meet."""


@dataclass(frozen=True)
class DiskReads:
    """How a disk is read."""

    in_flight: int
    """Direct reads at a time."""
    num_bytes: int
    """Of one read at the most; whole blocks."""

    def __str__(self) -> str:
        return f"{self.in_flight} x {self.num_bytes / MIB:g} MiB"


READS = {"cpu": DiskReads(8, 8 * MIB), "cuda": DiskReads(2, 8 * MIB)}
"""By the device that tensors are read to. Through buffers: two, so that the disk is busy while one reader waits for the
interpreter, which other threads use too. One of 8 MiB, and two of 4, were slower next to a thread that lists
kernels (1.6 and 1.9 for 2.0 GB/s); two of 16 were slower without it (2.3 for 2.6). In place on a CPU every read also
waits for fresh pages, so more of them pay: 1.7 GB/s for 1.3 with two. (Virtual disk and cores, Linux 6.18.)"""


@dataclass(frozen=True)
class Piece:
    """A range of one tensor, in bytes."""

    entry: TensorEntry
    begin: int
    """In the file."""
    end: int

    @property
    def place(self) -> slice:
        """Where it belongs in the tensor's bytes."""
        return slice(self.begin - self.entry.file_begin, self.end - self.entry.file_begin)


@dataclass(frozen=True)
class ReadChunk:
    """One read: pieces that follow each other in a file."""

    pieces: tuple[Piece, ...]

    @property
    def file(self) -> Path:
        return self.pieces[0].entry.file

    @property
    def begin(self) -> int:
        return self.pieces[0].begin

    @property
    def end(self) -> int:
        return self.pieces[-1].end

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def block_begin(offset: int) -> int:
    return offset // BLOCK * BLOCK


def block_end(offset: int) -> int:
    return -(-offset // BLOCK) * BLOCK


def is_small(entry: TensorEntry) -> bool:
    return entry.num_bytes < SMALL


def cut(entries: Sequence[TensorEntry], num_bytes: int, in_place: Callable[[TensorEntry], bool]) -> list[ReadChunk]:
    """All bytes of these tensors, in their order but for what ``SORTED`` says. Empty tensors have none.

    A chunk lies between two multiples of ``num_bytes`` in its file. ``in_place``: tensors whose chunks hold nothing of
    another.
    """
    chunks: list[ReadChunk] = []
    for group in _groups(entry for entry in entries if entry.num_bytes):
        pending: list[Piece] = []
        for entry in sorted(group, key=lambda entry: (entry.file, entry.begin)):
            for piece in _split(entry, num_bytes):
                joins = pending and _follows(pending[-1], piece) and piece.begin % num_bytes
                if pending and not (joins and not in_place(entry) and not in_place(pending[-1].entry)):
                    chunks.append(ReadChunk(tuple(pending)))
                    pending = []
                pending.append(piece)
        if pending:
            chunks.append(ReadChunk(tuple(pending)))
    return chunks


def _groups(entries: Iterable[TensorEntry]) -> Iterator[list[TensorEntry]]:
    group: list[TensorEntry] = []
    size = 0
    for entry in entries:
        group.append(entry)
        size += entry.num_bytes
        if size >= SORTED:
            yield group
            group, size = [], 0
    if group:
        yield group


def _follows(last: Piece, piece: Piece) -> bool:
    return last.entry.file == piece.entry.file and last.end == piece.begin


def _split(entry: TensorEntry, num_bytes: int) -> Iterator[Piece]:
    begin, last = entry.file_begin, entry.file_begin + entry.num_bytes
    while begin < last:
        end = min((begin // num_bytes + 1) * num_bytes, last)
        yield Piece(entry, begin, end)
        begin = end
