"""What ``staged`` knows of as tensors, and copies out of them on the device."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from microscale.models.reading.chunks import Chunk, Piece
from microscale.models.reading.staged import extents_on
from microscale.models.safetensors_header import TensorEntry

if TYPE_CHECKING:
    from torch import Tensor


class _OnGpu:
    """Memory of a GPU that torch did not allocate, in the form in which it takes such."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def memory_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """Bytes that somebody else allocated, and keeps for as long as the tensor is used."""
    if device.type == "cuda":
        return torch.as_tensor(_OnGpu(address, num_bytes), device=device)
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


class StagedMemory:
    """What lies on the device already of the files of ``entries``."""

    def __init__(self, entries: Sequence[TensorEntry], device: torch.device) -> None:
        states = {entry.stamp for entry in entries}
        self._found = {
            stamp: [(extent, memory_at(extent.address, extent.end - extent.begin, device)) for extent in extents]
            for stamp in states
            if (extents := extents_on(device, stamp))
        }

    def has(self, chunk: Chunk) -> bool:
        """Whether all of a chunk is there."""
        pieces = self._within(chunk.pieces[0].entry, chunk.begin, chunk.end)
        return sum(end - begin for begin, end, _ in pieces) == chunk.num_bytes

    def copy(self, piece: Piece, target: Tensor) -> None:
        """Fill ``target`` on the current stream."""
        for begin, end, source in self._within(piece.entry, piece.begin, piece.end):
            target[begin - piece.begin : end - piece.begin].copy_(source, non_blocking=True)

    def _within(self, entry: TensorEntry, begin: int, end: int) -> Iterator[tuple[int, int, Tensor]]:
        """What is there between two bytes of the file, and its memory."""
        found = self._found.get(entry.stamp, [])
        for extent, memory in found[bisect_right(found, begin, key=lambda each: each[0].end) :]:
            if extent.begin >= end:
                break
            first, last = max(begin, extent.begin), min(end, extent.end)
            yield first, last, memory[first - extent.begin : last - extent.begin]
