"""Reads tensors in the order in which they will be asked for, several chunks at a time, some way ahead of the caller.

    order:   | taken | held: read, or being read, and not taken | not begun
                     |<------------ at most ``ahead`` --------->|

Threads read (the system call leaves the interpreter free), the caller's thread takes. A tensor that is asked for before
its turn is read at once, window or not, so no order can make the two wait for each other: a wrong order costs speed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from microscale.errors import BadCheckpoint
from microscale.models.reading.chunks import READS, DiskReads, ReadChunk, block_begin, block_end, cut
from microscale.models.reading.file import FileChanged, ReadMethod, WeightFile
from microscale.models.reading.targets import Buffers, Landing, Targets, targets_on, typed
from microscale.models.safetensors_header import TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

THREADS = 8
"""Readers. All of them read what is in the page cache, which is a copy by the CPU, and where direct reads are refused;
``Reads.in_flight`` of them read from the disk."""
SPARE = 4
"""Buffers that are copied while every reader has one."""
AHEAD = {"cpu": 512 << 20, "cuda": 1 << 30}
"""Bytes that are read before they are taken. On a GPU they wait in its own memory."""


class _ReadJob:
    """A chunk that some thread will read."""

    def __init__(self, chunk: ReadChunk) -> None:
        self.chunk = chunk
        self.begun = False
        self.from_disk = False
        """Once it is begun: whether it takes one of the reads in flight."""

    @property
    def offset(self) -> int:
        return block_begin(self.chunk.begin)

    @property
    def num_bytes(self) -> int:
        """Of the whole blocks."""
        return block_end(self.chunk.end) - self.offset


class _Pending:
    """A tensor that was not taken yet."""

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry
        self.jobs: list[_ReadJob] = []
        self.left = self.num_bytes = 0
        """Chunks that have not arrived; bytes that are read, in all."""
        self.landing: Landing | None = None
        self.mark: object = None


class ReadAhead:
    """Reads ``entries`` onto a device. ``take`` gives each of them once; the threads end with the context."""

    def __init__(
        self,
        entries: Sequence[TensorEntry],
        device: torch.device,
        *,
        reads: DiskReads | None = None,
        ahead: int | None = None,
        targets: Targets | None = None,
    ) -> None:
        """``targets``: where tensors arrive, for benchmarks; on the device without."""
        reads = READS[device.type] if reads is None else reads
        self.device = device
        self.total = sum(entry.num_bytes for entry in entries)
        self.taken = 0
        """Bytes of the tensors that were taken."""
        self._ahead = AHEAD[device.type] if ahead is None else ahead
        self._reads = reads
        self._held = self._in_flight = 0
        lock = threading.Lock()
        self._arrived, self._may_read = threading.Condition(lock), threading.Condition(lock)
        """What the caller waits for, and what readers wait for."""
        self._error: BaseException | None = None
        self._closed = False
        self._targets = targets_on(device) if targets is None else targets
        self._pending = {entry.name: _Pending(entry) for entry in entries}
        self._queue: deque[_ReadJob] = deque()
        self._urgent: deque[_ReadJob] = deque()
        for chunk in cut(entries, reads.num_bytes, self._targets.reads_in_place):
            self._add_job(chunk)
        self._files = _open(entries)
        count = min(max(THREADS, reads.in_flight), len(self._queue))
        self._buffers = Buffers(lambda: self._targets.buffer_memory(reads.num_bytes), count + SPARE)
        self._threads = [threading.Thread(target=self._work, name="weights", daemon=True) for _ in range(count)]

    def _add_job(self, chunk: ReadChunk) -> None:
        job = _ReadJob(chunk)
        self._queue.append(job)
        for piece in chunk.pieces:
            pending = self._pending[piece.entry.name]
            pending.jobs.append(job)
            pending.left += 1
            pending.num_bytes += piece.end - piece.begin

    @property
    def ways(self) -> dict[Path, ReadMethod]:
        """How each file is read."""
        return {path: file.way for path, file in self._files.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._pending

    def __enter__(self) -> ReadAhead:
        self.begun_at = time.perf_counter()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.seconds = time.perf_counter() - self.begun_at
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()
            self._may_read.notify_all()
        for thread in self._threads:
            thread.join()
        self._targets.close()
        for file in self._files.values():
            file.close()

    def take(self, name: str) -> Tensor:
        """One tensor, as soon as all of it is there."""
        with self._arrived:
            pending = self._pending[name]
            waiting = [job for job in pending.jobs if not job.begun]
            if waiting:
                self._urgent.extend(waiting)
                self._may_read.notify()
            self._arrived.wait_for(lambda: pending.left == 0 or self._error is not None or self._closed)
            if self._error is not None:
                raise self._error
            del self._pending[name]
            self._held -= pending.num_bytes
            self.taken += pending.entry.num_bytes
            self._may_read.notify()
        entry = pending.entry
        if pending.landing is None:  # the tensor is empty
            data = torch.empty(entry.num_bytes, dtype=torch.uint8, device=self.device)
        else:
            data = pending.landing.data
            self._targets.take(pending.mark)
        return typed(entry, data)

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._fetch(job)
        except BaseException as error:
            with self._arrived:
                self._error = self._error or error
                self._arrived.notify_all()
                self._may_read.notify_all()

    def _next(self) -> _ReadJob | None:
        """The chunk to read now; ``None`` at the end. Waits while the window is full or the disk has enough to do."""
        with self._may_read:
            while not self._closed and self._error is None and (self._urgent or self._queue):
                queue = self._startable()
                if queue is None:
                    self._may_read.wait()
                    continue
                job = queue.popleft()
                job.begun, job.from_disk = True, self._is_direct(job)
                self._in_flight += job.from_disk
                self._held += job.chunk.num_bytes
                self._land(job.chunk)
                if self._startable() is not None:  # one reader wakes the next
                    self._may_read.notify()
                return job
        return None

    def _startable(self) -> deque[_ReadJob] | None:
        """Which queue's first chunk may be read now, if one may."""
        for queue in (self._urgent, self._queue):
            while queue and queue[0].begun:
                queue.popleft()
        queue = self._urgent or self._queue
        if not queue or (queue is self._queue and self._held >= self._ahead):
            return None
        is_busy = self._in_flight >= self._reads.in_flight
        return None if is_busy and self._is_direct(queue[0]) else queue

    def _is_direct(self, job: _ReadJob) -> bool:
        return self._files[job.chunk.file].is_direct(job.offset, job.num_bytes)

    def _land(self, chunk: ReadChunk) -> None:
        for piece in chunk.pieces:
            pending = self._pending[piece.entry.name]
            if pending.landing is None:
                pending.landing = self._targets.land(piece.entry)

    def _fetch(self, job: _ReadJob) -> None:
        chunk = job.chunk
        file = self._files[chunk.file]
        landings = {piece.entry.name: self._landing(piece.entry) for piece in chunk.pieces}
        place = landings[chunk.pieces[0].entry.name].in_place(chunk) if len(chunk.pieces) == 1 else None
        try:
            if place is not None:
                file.read_into(_bytes(place), job.offset, chunk.end)
                self._read(job)
            else:
                buffer = self._buffers.take()
                source = buffer.range_for(chunk)
                file.read_into(_bytes(source), job.offset, chunk.end)
                self._read(job)
                self._targets.copy(chunk, source, buffer, landings)
                self._buffers.give_back(buffer)
            self._arrive(chunk, file)
        except OSError as error:
            name = chunk.pieces[0].entry.name
            raise BadCheckpoint(f"{chunk.file}: tensor {name!r} cannot be read: {error.strerror}.") from error
        except FileChanged as error:
            raise _named(error, chunk.pieces[0].entry) from error

    def _read(self, job: _ReadJob) -> None:
        """The disk has brought a chunk: another reader begins the next while this one sees to its bytes."""
        with self._may_read:
            self._in_flight -= job.from_disk
            if self._startable() is not None:
                self._may_read.notify()

    def _arrive(self, chunk: ReadChunk, file: WeightFile) -> None:
        with self._arrived:
            tensors = [self._pending[piece.entry.name] for piece in chunk.pieces]
            whole = [pending for pending in tensors if pending.left == 1]
            if whole:
                file.check_unchanged()  # after the last byte of a tensor was read, and before it is handed out
            for pending in tensors:
                pending.left -= 1
            for pending in whole:
                pending.mark = self._targets.mark()
            if whole:
                self._arrived.notify_all()

    def _landing(self, entry: TensorEntry) -> Landing:
        landing = self._pending[entry.name].landing
        assert landing is not None  # made when the chunk was begun
        return landing


def _named(error: FileChanged, entry: TensorEntry) -> FileChanged:
    return FileChanged(f"{error} Tensor {entry.name!r} was being read.")


def _bytes(memory: Tensor) -> memoryview:
    return memory.numpy().data


def _open(entries: Sequence[TensorEntry]) -> dict[Path, WeightFile]:
    files: dict[Path, WeightFile] = {}
    try:
        for entry in entries:
            if entry.file not in files:
                files[entry.file] = WeightFile(entry.file, entry.stamp)
    except OSError as error:
        for file in files.values():
            file.close()
        raise BadCheckpoint(f"{entry.file}: tensor {entry.name!r} cannot be read: {error.strerror}.") from error
    except BaseException:
        for file in files.values():
            file.close()
        raise
    return files
