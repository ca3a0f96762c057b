"""Weights on their way from the disk to the GPU while the engine process imports torch.

The engine reads its weights with torch, and can begin when that is there and the plan is made, seconds after it was
told which model. Until then threads read the files from their first byte on, past the page cache, into pinned buffers,
and copy them to memory of the GPU, as they are, by its driver alone:

    file ──read_into──► pinned buffer, one a thread ──cuMemcpyHtoD──► segments on the GPU
                                      load: range that it wants ◄──copy on the GPU──┘  then all segments are freed

Reads are large, so that a thread seldom asks for the interpreter's lock, which the import holds for 5 ms at a time. The
load finds by ``models/reading/staged`` what is there. The memory counts as free meanwhile: see ``_room``.

Nothing is read ahead where torch's own files have to come from the disk: its import reads a thousand small files, each
of which would wait behind large reads. Nor where cores are few, nor where GPU and CPU share their memory.
Needs no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from microscale.engine.process.ahead import has_own_memory, torch_has_cuda
from microscale.engine.process.driver import LIBCUDA, DriverError, Memory
from microscale.engine.process.messages import EngineConfig
from microscale.engine.process.torch_files import torch_is_cached
from microscale.errors import MicroscaleError
from microscale.models import hub
from microscale.models.config import LoadFormat
from microscale.models.reading import staged
from microscale.models.reading.chunks import block_end
from microscale.models.reading.file import Stamp, WeightFile
from microscale.models.reading.staged import Extent

log = logging.getLogger(__name__)
THREADS = 4
"""That have a read in flight and a buffer each."""
CHUNK = 64 << 20
EARLY = 4
"""Reads of each thread that wait in memory of the host, 1 GiB of all threads, until the GPU is open. That takes some
tenths of a second."""
SEGMENT = 512 << 20
"""Bytes that the driver is asked for at a time."""
GROWTH, LEFT_FREE = 1.1, 4 << 30
"""What a load may take of the GPU beside what was read ahead: so many times the files' bytes, and these."""
CORES = 8
NOTHING = "Weights are not read ahead: %s."


def why_not() -> str | None:
    """Why reading ahead does not pay here, if it does not. To be asked before torch is imported."""
    cores = len(os.sched_getaffinity(0))
    if cores < CORES:
        return f"{cores} CPU cores are too few, it takes {CORES}"
    is_cached = torch_is_cached()
    if is_cached is None:
        return "this system does not tell whether torch's own files are in the page cache"
    return None if is_cached else "torch's own files are not in the page cache and come from the disk first"


def start_staging(config: EngineConfig, reason: str | None) -> Staging | None:
    """Read a model's weights ahead if they are to be read from here to a GPU's own memory. ``reason``: ``why_not``'s,
    which is then logged."""
    files = files_of(config)
    if reason is None and config.tensor_parallel_size > 1:
        reason = f"each of {config.tensor_parallel_size} ranks reads a part of its own"
    if files and reason is not None:
        log.info(NOTHING, reason)
    if not files or reason is not None:
        return None
    staging = Staging(files, config.device)
    staged.register(staging)
    return staging


def files_of(config: EngineConfig) -> list[Path]:
    """The files whose weights will be read to memory of a GPU's own, as far as they are here."""
    if config.load_format == LoadFormat.DUMMY:
        return []
    with contextlib.suppress(Exception):  # the load tells what is wrong
        if not torch_has_cuda() or not has_own_memory(config.device):
            return []
        return sorted(hub.resolve(config.model, offline=True).glob("*.safetensors"))
    return []


def same_weights(one: EngineConfig, other: EngineConfig) -> bool:
    """Whether what is read ahead for one is of use to the other."""

    def of(config: EngineConfig) -> tuple[object, ...]:
        return config.model, config.device, config.load_format, config.tensor_parallel_size

    return of(one) == of(other)


class _Buffer:
    """Memory of the host that begins at a page."""

    def __init__(self, memory: ctypes.Array[ctypes.c_char]) -> None:
        self.address = ctypes.addressof(memory)
        self.view = memoryview(memory).cast("B")


@dataclass(frozen=True)
class _Part:
    """One read, and where its bytes go on the GPU, as soon as that is known."""

    file: WeightFile
    stamp: Stamp
    begin: int
    end: int
    address: int | None = None

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    def read_into(self, buffer: _Buffer) -> None:
        self.file.read_into(buffer.view[: block_end(self.num_bytes)], self.begin, self.end)
        self.file.check_unchanged()


class Staging:
    """Threads that read ``files`` ahead, from their first byte on, until ``stop``. A ``staged.Stage``."""

    def __init__(self, files: list[Path], gpu: str, library: str = LIBCUDA, device: str | None = None) -> None:
        """``gpu``: as ``--device`` names it. ``device``: as torch does, for a driver that is not a GPU's."""
        self.device = device or f"cuda:{gpu.partition(':')[2] or 0}"
        self.held = 0
        self._files = files
        self._gpu, self._library = gpu, library
        self._memory: Memory | None = None
        self._is_open = threading.Event()
        """Or cannot be."""
        self._room = self._left = 0
        """Bytes that may be allocated, and those of the files that have no place yet."""
        self._segments: list[int] = []
        self._at = self._end = 0
        """Of the last segment: the first free byte, and its end."""
        self._opened: list[WeightFile] = []
        self._parts = self._cut()
        self._extents: dict[Stamp, list[Extent]] = defaultdict(list)
        self._why_not: str | None = None
        """What ended it before its time."""
        self._stopped = False
        self._lock = threading.Lock()
        self._begun_at = self._last_at = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="stage", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Of the files, that are on the GPU."""
        with self._lock:
            return sum(each.end - each.begin for extents in self._extents.values() for each in extents)

    @property
    def spare(self) -> int:
        """Bytes of the GPU's memory that might have been taken and were not."""
        return max(self._room - self.held, 0)

    def stop(self) -> None:
        """Begin no further read."""
        self._stopped = True

    def settle(self) -> None:
        """The same, and wait for those in flight."""
        self.stop()
        self._thread.join()

    def extents(self, stamp: Stamp) -> list[Extent]:
        return self._extents.get(stamp, [])

    def drop(self) -> None:
        """Free the GPU's memory, after all copies out of it."""
        self.settle()
        if self._segments:
            # In a thread of its own: in this one another GPU may be the current one.
            thread = threading.Thread(target=self._free, name="stage", daemon=True)
            thread.start()
            thread.join()

    def _run(self) -> None:
        threads = [threading.Thread(target=self._work, name="stage", daemon=True) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        try:
            memory = Memory(self._gpu, self._library)
            memory.enter()
            sizes = [file.stat().st_size for file in self._files]
            with self._lock:
                self._left = sum(block_end(size) for size in sizes)
                self._room = _room(memory.free(), sum(sizes))
                self._memory = memory
        except (DriverError, OSError) as error:
            self._fail(error)
        self._is_open.set()
        for thread in threads:
            thread.join()
        for file in self._opened:
            file.close()
        self._tell()

    def _work(self) -> None:
        try:
            early = self._read_early()
            self._is_open.wait()
            if self._memory is None:
                return
            self._memory.enter()
            while early:
                self._bring(*early.pop(0))  # and the system has its memory back
            with self._memory.pinned(CHUNK) as address:
                buffer = _Buffer((ctypes.c_char * CHUNK).from_address(address))
                while (part := self._next(placed=True)) is not None:
                    part.read_into(buffer)
                    self._bring(part, buffer)
        except (DriverError, MicroscaleError, OSError) as error:
            self._fail(error)

    def _read_early(self) -> list[tuple[_Part, _Buffer]]:
        """The disk need not wait for the GPU."""
        found: list[tuple[_Part, _Buffer]] = []
        while len(found) < EARLY and not self._is_open.is_set() and (part := self._next(placed=False)):
            memory = mmap.mmap(-1, CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            buffer = _Buffer((ctypes.c_char * CHUNK).from_buffer(memory))
            part.read_into(buffer)
            found.append((part, buffer))
        return found

    def _bring(self, part: _Part, source: _Buffer) -> None:
        """To the GPU."""
        assert self._memory is not None
        address = part.address
        if address is None:
            with self._lock:
                address = self._place(part)
        self._memory.copy_in(address, source.address, part.num_bytes)
        with self._lock:
            self._extents[part.stamp].append(Extent(part.begin, part.end, address))
            self._last_at = time.perf_counter()

    def _next(self, *, placed: bool) -> _Part | None:
        """What to read now. ``placed``: with its place on the GPU, at once, so that what follows it in a file does so
        there too; for threads that have entered."""
        with self._lock:
            part = None if self._stopped else next(self._parts, None)
            return part if part is None or not placed else replace(part, address=self._place(part))

    def _cut(self) -> Iterator[_Part]:
        """All reads, in the files' order."""
        for path in self._files:
            stamp = Stamp.of(path.stat())
            file = WeightFile(path, stamp)
            self._opened.append(file)
            for begin in range(0, stamp.size, CHUNK):
                yield _Part(file, stamp, begin, min(begin + CHUNK, stamp.size))

    def _place(self, part: _Part) -> int:
        """Where its bytes go: behind the last ones, or to a new segment."""
        num_bytes = block_end(part.num_bytes)
        if self._end - self._at < num_bytes:
            size = min(SEGMENT, self._left, self._room - self.held)
            if size < num_bytes:
                raise DriverError("too little of the GPU's memory is free")
            assert self._memory is not None
            self._at = self._memory.allocate(size)
            self._end = self._at + size
            self._segments.append(self._at)
            self.held += size
        address = self._at
        self._at += num_bytes
        self._left -= num_bytes
        return address

    def _fail(self, error: Exception) -> None:
        """The load tells what is wrong with a file or a GPU; here it is the end, and no more."""
        self._stopped = True
        with self._lock:
            self._why_not = self._why_not or (isinstance(error, OSError) and error.strerror) or str(error).rstrip(".")

    def _tell(self) -> None:
        """Log how much was read, or why nothing was."""
        num_bytes = self.num_bytes
        if not num_bytes:
            log.info(NOTHING, self._why_not or "there was no time")
            return
        seconds, ended = self._last_at - self._begun_at, f" Then {self._why_not}." if self._why_not else ""
        log.info("%.2f GB of weights were read ahead, in %.2f s.%s", num_bytes / 1e9, seconds, ended)

    def _free(self) -> None:
        assert self._memory is not None  # there are segments
        self._extents.clear()
        with contextlib.suppress(DriverError):  # a GPU that failed: who uses it tells
            self._memory.enter()
            self._memory.synchronize()
            while self._segments:
                self._memory.release(self._segments.pop())
        self.held = 0


def _room(free: int, file_bytes: int) -> int:
    """Bytes of the GPU's memory that may be taken: what the load needs at the same time stays free, so that no load
    fails for it. ``free``: of that memory now."""
    return max(free - int(GROWTH * file_bytes) - LEFT_FREE, 0)
