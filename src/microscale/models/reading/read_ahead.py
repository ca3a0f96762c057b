"""Reads tensors in the order in which they will be asked for, several chunks at a time, some way ahead of who asks.

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
from microscale.models.reading.chunks import Chunk, block_begin, cut
from microscale.models.reading.file import FileChanged, Way, WeightFile
from microscale.models.reading.targets import BUFFERS, Buffer, Landing, targets_on, typed
from microscale.models.safetensors_header import TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

THREADS = 8
"""Reads in flight."""
AHEAD = {"cpu": 512 << 20, "cuda": 1 << 30}
"""Bytes that are read before they are taken. On a GPU they wait in its own memory."""


class _Job:
    """A chunk that some thread will read."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.begun = False


class _Pending:
    """A tensor that was not taken yet."""

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry
        self.jobs: list[_Job] = []
        self.left = 0
        """Chunks that have not arrived."""
        self.landing: Landing | None = None
        self.mark: object = None


class ReadAhead:
    """Reads ``entries`` onto a device. ``take`` gives each of them once; the threads end with the context."""

    def __init__(
        self, entries: Sequence[TensorEntry], device: torch.device, *, threads: int = THREADS, ahead: int | None = None
    ) -> None:
        self.device = device
        self.total = sum(entry.num_bytes for entry in entries)
        self.taken = 0
        self._ahead = AHEAD[device.type] if ahead is None else ahead
        self._held = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._pending = {entry.name: _Pending(entry) for entry in entries}
        self._queue = deque(_Job(chunk) for chunk in cut(entries))
        self._urgent: deque[_Job] = deque()
        for job in self._queue:
            for piece in job.chunk.pieces:
                pending = self._pending[piece.entry.name]
                pending.jobs.append(job)
                pending.left += 1
        self._targets = targets_on(device)
        self._files = _open(entries)
        count = min(threads, len(self._queue))
        self._threads = [threading.Thread(target=self._work, name="weights", daemon=True) for _ in range(count)]

    @property
    def ways(self) -> dict[Path, Way]:
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
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._targets.close()
        for file in self._files.values():
            file.close()

    def take(self, name: str) -> Tensor:
        """One tensor, as soon as all of it is there."""
        with self._changed:
            pending = self._pending[name]
            waiting = [job for job in pending.jobs if not job.begun]
            if waiting:
                self._urgent.extend(waiting)
                self._changed.notify_all()
            self._changed.wait_for(lambda: pending.left == 0 or self._error is not None or self._closed)
            if self._error is not None:
                raise self._error
            del self._pending[name]
            self._held -= pending.entry.num_bytes
            self.taken += pending.entry.num_bytes
            self._changed.notify_all()
        if pending.landing is None:  # an empty tensor
            return typed(pending.entry, torch.empty(0, dtype=torch.uint8, device=self.device))
        self._targets.take(pending.mark)
        return typed(pending.entry, pending.landing.data)

    def _work(self) -> None:
        buffers: deque[Buffer] = deque()
        try:
            while (chunk := self._next()) is not None:
                self._fetch(chunk, buffers)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _next(self) -> Chunk | None:
        """The chunk to read now; ``None`` at the end. Waits while the window is full."""
        with self._changed:
            while True:
                for queue in (self._urgent, self._queue):
                    while queue and queue[0].begun:
                        queue.popleft()
                if self._closed or self._error is not None or not (self._urgent or self._queue):
                    return None
                if self._urgent or self._held < self._ahead:
                    job = (self._urgent or self._queue).popleft()
                    job.begun = True
                    self._held += job.chunk.num_bytes
                    self._land(job.chunk)
                    return job.chunk
                self._changed.wait()

    def _land(self, chunk: Chunk) -> None:
        for piece in chunk.pieces:
            pending = self._pending[piece.entry.name]
            if pending.landing is None:
                pending.landing = self._targets.land(piece.entry)

    def _fetch(self, chunk: Chunk, buffers: deque[Buffer]) -> None:
        file = self._files[chunk.file]
        landings = {piece.entry.name: self._landing(piece.entry) for piece in chunk.pieces}
        place = landings[chunk.pieces[0].entry.name].in_place(chunk) if len(chunk.pieces) == 1 else None
        try:
            if place is not None:
                file.read_into(_bytes(place), block_begin(chunk.begin), chunk.end)
            else:
                buffer = buffers.popleft() if len(buffers) == BUFFERS else self._targets.buffer()
                buffers.append(buffer)
                source = buffer.range_for(chunk)
                file.read_into(_bytes(source), block_begin(chunk.begin), chunk.end)
                self._targets.copy(chunk, source, buffer, landings)
            file.check_unchanged()
        except OSError as error:
            name = chunk.pieces[0].entry.name
            raise BadCheckpoint(f"{chunk.file}: tensor {name!r} cannot be read: {error.strerror}.") from error
        except FileChanged as error:
            raise FileChanged(f"{error} Tensor {chunk.pieces[0].entry.name!r} was being read.") from error
        with self._changed:
            for piece in chunk.pieces:
                pending = self._pending[piece.entry.name]
                pending.left -= 1
                if pending.left == 0:
                    pending.mark = self._targets.mark()
            self._changed.notify_all()

    def _landing(self, entry: TensorEntry) -> Landing:
        landing = self._pending[entry.name].landing
        assert landing is not None  # made when the chunk was begun
        return landing


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
