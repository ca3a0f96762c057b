"""The memory that tensors arrive in, on the CPU or on a GPU, and the buffers that reads go through on the way there.

On a CPU a large tensor is read in place: its memory begins at the same distance from a block as the tensor does in its
file, and has room for whole blocks at both ends. Everything else is read into a buffer and copied, which on a GPU the
card does by itself from pinned memory, on a stream of its own.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from microscale.models.reading.chunks import ReadChunk, block_begin, block_end, is_small
from microscale.models.reading.file import BLOCK
from microscale.models.safetensors_header import DTYPE_BYTES, TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

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
    """Uninitialised bytes that begin at a page. The system takes them back as soon as nothing refers to them."""
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
    dtype: torch.dtype = getattr(torch, TORCH_NAMES[entry.dtype])
    return dtype


def typed(entry: TensorEntry, data: Tensor) -> Tensor:
    return data.view(dtype_of(entry)).view(entry.shape)


class Copy(Protocol):
    """A copy on its way: a CUDA event behind it."""

    def query(self) -> bool:
        """Whether it has ended."""

    def synchronize(self) -> None:
        """Wait for its end."""


class Buffer:
    """One read's worth of memory, and what must end before it is filled again."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.copied: Copy | None = None

    @property
    def is_free(self) -> bool:
        return self.copied is None or self.copied.query()

    def range_for(self, chunk: ReadChunk) -> Tensor:
        """The part that takes the whole blocks around a chunk."""
        return self.memory[: block_end(chunk.end) - block_begin(chunk.begin)]


class Buffers:
    """The buffers of all readers, ``most`` of them: one for each reader, and more for what is being copied.

    The last one that came back is used first, and a new one is made only where none is free. So few are in use, and
    they stay in the CPU's cache: a virtual disk is a copy of memory to memory, and to 4 MiB that are used over and over
    it was a third faster than to 64 MiB (3.1 and 2.3 GB/s, Linux 6.18 on two virtual cores).
    """

    def __init__(self, make: Callable[[], Tensor], most: int) -> None:
        self._make = make
        self._left = most
        self._back: list[Buffer] = []
        """The last one is the one that came back last."""
        self._lock = threading.Lock()

    def take(self) -> Buffer:
        """One that is free. Waits only where all are being copied."""
        with self._lock:
            place = next((at for at in reversed(range(len(self._back))) if self._back[at].is_free), None)
            make = place is None and self._left > 0
            self._left -= make
            buffer = None if make else self._back.pop(place or 0)
        if buffer is None:
            return Buffer(self._make())
        if buffer.copied is not None:
            buffer.copied.synchronize()
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        with self._lock:
            self._back.append(buffer)


@dataclass
class Landing:
    """The memory of one tensor."""

    entry: TensorEntry
    data: Tensor
    """Its bytes, on the device."""
    around: Tensor | None = None
    """The whole blocks around them, where they are read in place."""

    def in_place(self, chunk: ReadChunk) -> Tensor | None:
        """Where a chunk of this tensor is read to without a buffer."""
        if self.around is None:
            return None
        begin = block_begin(self.entry.file_begin)
        return self.around[block_begin(chunk.begin) - begin : block_end(chunk.end) - begin]


class Targets(Protocol):
    """The memory of one kind of device."""

    def reads_in_place(self, entry: TensorEntry) -> bool:
        """Whether a tensor is read straight to where it stays."""

    def land(self, entry: TensorEntry) -> Landing:
        """New memory for a tensor."""

    def buffer_memory(self, num_bytes: int) -> Tensor:
        """New memory for reads."""

    def copy(self, chunk: ReadChunk, source: Tensor, buffer: Buffer, landings: dict[str, Landing]) -> None:
        """Bring what was read to its tensors, or see that it gets there before ``take`` is followed."""

    def mark(self) -> object:
        """The point after all that was copied so far."""

    def take(self, mark: object) -> None:
        """Whatever the caller starts from here on sees what was copied up to ``mark``."""

    def close(self) -> None:
        """Wait for what is still being copied."""


class HostTargets:
    """Tensors on the CPU."""

    def reads_in_place(self, entry: TensorEntry) -> bool:
        # A file may hold its tensors at offsets at which their numbers cannot be addressed.
        return not is_small(entry) and entry.file_begin % DTYPE_BYTES[entry.dtype] == 0

    def land(self, entry: TensorEntry) -> Landing:
        if not self.reads_in_place(entry):
            return Landing(entry, torch.empty(entry.num_bytes, dtype=torch.uint8))
        begin, end = entry.file_begin, entry.file_begin + entry.num_bytes
        around = aligned_bytes(block_end(end) - block_begin(begin))
        first = begin - block_begin(begin)
        return Landing(entry, around[first : first + entry.num_bytes], around)

    def buffer_memory(self, num_bytes: int) -> Tensor:
        return aligned_bytes(num_bytes)

    def copy(self, chunk: ReadChunk, source: Tensor, buffer: Buffer, landings: dict[str, Landing]) -> None:
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

    def reads_in_place(self, entry: TensorEntry) -> bool:
        return False

    def land(self, entry: TensorEntry) -> Landing:
        with torch.cuda.stream(self._callers):
            data = torch.empty(entry.num_bytes, dtype=torch.uint8, device=self._device)
        # The memory may have been another tensor's, which work that is queued there still reads.
        self._copying.wait_stream(self._callers)
        return Landing(entry, data)

    def buffer_memory(self, num_bytes: int) -> Tensor:
        return pinned_bytes(num_bytes)

    def copy(self, chunk: ReadChunk, source: Tensor, buffer: Buffer, landings: dict[str, Landing]) -> None:
        with torch.cuda.stream(self._copying):
            for target, part in _copies(chunk, source, landings):
                target.copy_(part, non_blocking=True)
            ended = torch.cuda.Event()
            ended.record(self._copying)
            buffer.copied = ended

    def mark(self) -> object:
        mark = torch.cuda.Event()
        mark.record(self._copying)
        return mark

    def take(self, mark: object) -> None:
        assert isinstance(mark, torch.cuda.Event)
        self._callers.wait_event(mark)

    def close(self) -> None:
        self._copying.synchronize()


def _copies(chunk: ReadChunk, source: Tensor, landings: dict[str, Landing]) -> list[tuple[Tensor, Tensor]]:
    """Each piece's place in its tensor, and its bytes in ``source``, which begins at the block of the chunk's begin."""
    first = block_begin(chunk.begin)
    return [
        (landings[piece.entry.name].data[piece.place], source[piece.begin - first : piece.end - first])
        for piece in chunk.pieces
    ]


def targets_on(device: torch.device) -> Targets:
    return CudaTargets(device) if device.type == "cuda" else HostTargets()
