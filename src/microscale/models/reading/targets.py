"""The memory that tensors arrive in, on the CPU or on a GPU, and the buffers that reads go through on the way there.

On a CPU a large tensor is read in place: its memory begins at the same distance from a block as the tensor does in its
file, and has room for whole blocks at both ends. Everything else is read into a buffer and copied, which on a GPU the
card does by itself from pinned memory, on a stream of its own.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from microscale.models.reading.chunks import CHUNK, Chunk, block_begin, block_end, is_small
from microscale.models.reading.file import BLOCK
from microscale.models.safetensors_header import DTYPE_BYTES, TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

BUFFERS = 2
"""Of each reading thread: one is filled while the other is copied."""

TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
}
"""Of the types in a file of safetensors."""


def aligned_bytes(count: int) -> Tensor:
    """Uninitialised bytes that begin at a page. The system takes them back as soon as nobody holds them."""
    # No huge pages: the system then spends 0.9 s on a GB and not 0.35 (two shared virtual cores, Linux 6.18).
    memory = mmap.mmap(-1, max(count, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8, count=count) if count else torch.empty(0, dtype=torch.uint8)


def pinned_bytes(count: int) -> Tensor:
    """Bytes in pinned memory that begin at a block. The driver's always do; torch takes powers of two from it."""
    memory = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    if memory.data_ptr() % BLOCK:
        memory = torch.empty(count + BLOCK, dtype=torch.uint8, pin_memory=True)
    begin = -memory.data_ptr() % BLOCK
    return memory[begin : begin + count]


def dtype_of(entry: TensorEntry) -> torch.dtype:
    found: torch.dtype = getattr(torch, TORCH_NAMES[entry.dtype])
    return found


def typed(entry: TensorEntry, data: Tensor) -> Tensor:
    return data.view(dtype_of(entry)).view(entry.shape)


class Buffer:
    """One read's worth of memory, and what must end before it is filled again."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.copied: torch.cuda.Event | None = None

    def range_for(self, chunk: Chunk) -> Tensor:
        """The part that takes the whole blocks around a chunk, free to be written."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.memory[: block_end(chunk.end) - block_begin(chunk.begin)]


@dataclass
class Landing:
    """The memory of one tensor."""

    entry: TensorEntry
    data: Tensor
    """Its bytes, on the device."""
    around: Tensor | None = None
    """The whole blocks around them, where they are read in place."""

    def in_place(self, chunk: Chunk) -> Tensor | None:
        """Where a chunk of this tensor is read to without a buffer."""
        if self.around is None:
            return None
        begin = block_begin(self.entry.file_begin)
        return self.around[block_begin(chunk.begin) - begin : block_end(chunk.end) - begin]


class Targets(Protocol):
    """The memory of one kind of device."""

    def land(self, entry: TensorEntry) -> Landing:
        """New memory for a tensor."""

    def buffer(self) -> Buffer:
        """A new buffer for one chunk."""

    def copy(self, chunk: Chunk, source: Tensor, buffer: Buffer, landings: dict[str, Landing]) -> None:
        """Bring what was read to its tensors, or see that it gets there before ``take`` is followed."""

    def mark(self) -> object:
        """The point after all that was copied so far."""

    def take(self, mark: object) -> None:
        """Whatever the caller starts from here on sees what was copied up to ``mark``."""

    def close(self) -> None:
        """Wait for what is still being copied."""


class HostTargets:
    """Tensors on the CPU."""

    def land(self, entry: TensorEntry) -> Landing:
        begin, end = entry.file_begin, entry.file_begin + entry.num_bytes
        # A file may hold its tensors at offsets at which their numbers cannot be addressed.
        if is_small(entry) or begin % DTYPE_BYTES[entry.dtype]:
            return Landing(entry, torch.empty(entry.num_bytes, dtype=torch.uint8))
        around = aligned_bytes(block_end(end) - block_begin(begin))
        first = begin - block_begin(begin)
        return Landing(entry, around[first : first + entry.num_bytes], around)

    def buffer(self) -> Buffer:
        return Buffer(aligned_bytes(CHUNK))

    def copy(self, chunk: Chunk, source: Tensor, buffer: Buffer, landings: dict[str, Landing]) -> None:
        for target, part in _copies(chunk, source, landings):
            target.copy_(part)

    def mark(self) -> object:
        return None

    def take(self, mark: object) -> None:
        pass

    def close(self) -> None:
        pass


class CudaTargets:
    """Tensors on a GPU. They are allocated and used on the caller's stream and filled on another:

    caller's stream   | allocate ────► record                          wait ──► use, free
    copying stream    |                wait ──► copy, copy … ──► mark
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._callers = torch.cuda.current_stream(device)
        self._copying = torch.cuda.Stream(device)

    def land(self, entry: TensorEntry) -> Landing:
        with torch.cuda.stream(self._callers):
            data = torch.empty(entry.num_bytes, dtype=torch.uint8, device=self._device)
        # The memory may have been another tensor's, which work that is queued there still reads.
        self._copying.wait_stream(self._callers)
        return Landing(entry, data)

    def buffer(self) -> Buffer:
        return Buffer(pinned_bytes(CHUNK))

    def copy(self, chunk: Chunk, source: Tensor, buffer: Buffer, landings: dict[str, Landing]) -> None:
        with torch.cuda.stream(self._copying):
            for target, part in _copies(chunk, source, landings):
                target.copy_(part, non_blocking=True)
            buffer.copied = torch.cuda.Event()
            buffer.copied.record(self._copying)

    def mark(self) -> object:
        mark = torch.cuda.Event()
        mark.record(self._copying)
        return mark

    def take(self, mark: object) -> None:
        assert isinstance(mark, torch.cuda.Event)
        self._callers.wait_event(mark)

    def close(self) -> None:
        self._copying.synchronize()


def _copies(chunk: Chunk, source: Tensor, landings: dict[str, Landing]) -> list[tuple[Tensor, Tensor]]:
    """Each piece's place in its tensor, and its bytes in ``source``, which begins at the block of the chunk's begin."""
    first = block_begin(chunk.begin)
    return [
        (landings[piece.entry.name].data[piece.place], source[piece.begin - first : piece.end - first])
        for piece in chunk.pieces
    ]


def targets_on(device: torch.device) -> Targets:
    return CudaTargets(device) if device.type == "cuda" else HostTargets()
