"""Weights on their way from the disk while the engine process imports torch: into the page cache, and out of it again.

The engine reads its weights past the page cache (``models/reading``), and can begin when torch is there and the plan is
made, seconds after it was told which model. Until then threads fetch the first chunks of the files. What is in the page
cache by then is read from there. What was fetched here is dropped when the weights are loaded; what others had left
there stays.

Nothing is fetched where torch's own files have to come from the disk: its import reads a thousand small files, each of
which would wait behind chunks of 8 MiB. Nor where cores are few: a GB costs one of them 0.3 s, there and back, and on
two of them reading from the page cache is no faster than from the disk. Nor where GPU and CPU share their memory: the
page cache would take its part of it. Needs no torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from microscale.engine.process.ahead import has_own_memory
from microscale.engine.process.messages import EngineConfig
from microscale.models import hub
from microscale.models.load_format import LoadFormat
from microscale.models.reading.page_cache import PAGE, resident_pages

log = logging.getLogger(__name__)
THREADS = 4
"""That wait for a chunk each."""
CHUNK = 8 << 20
FREE_SHARE, MOST = 8, 16 << 30
"""A part of the free memory, and bytes: a fast disk reads no more in the seconds of an import."""
CORES = 8
PROBES = 16


def can_fetch() -> bool:
    """Whether fetching pays here. To be asked before torch is imported."""
    return len(os.sched_getaffinity(0)) >= CORES and torch_is_cached()


def torch_is_cached() -> bool:
    """Whether torch's modules are in the page cache, as after an import since the machine was started. Some files are
    looked at, and none is waited for."""
    with contextlib.suppress(OSError, AttributeError, ImportError, ValueError):  # a system that cannot tell
        found = importlib.util.find_spec("torch")
        if found is None or found.cached is None:
            return False
        files = sorted(Path(found.cached).parent.glob("*.pyc"))
        probed = files[:: max(1, len(files) // PROBES)]
        return sum(map(_is_cached, probed)) > len(probed) // 2
    return False


def _is_cached(file: Path) -> bool:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def files_of(config: EngineConfig) -> list[Path]:
    """The files whose weights will be read to a GPU, as far as they are here. Of several ranks each reads a part."""
    if config.load_format == LoadFormat.DUMMY or config.tensor_parallel_size > 1:
        return []
    with contextlib.suppress(Exception):  # the load tells what is wrong
        if not has_own_memory(config.device):
            return []
        return sorted(hub.resolve(config.model, offline=True).glob("*.safetensors"))
    return []


def _room() -> int:
    """Bytes that may be fetched."""
    return min(MOST, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // FREE_SHARE)


@dataclass(frozen=True)
class _Range:
    fd: int
    begin: int
    size: int


class Fetching:
    """Threads that fetch ``files`` from their first chunk on, until ``stop``."""

    def __init__(self, files: list[Path], most: int | None = None) -> None:
        """``most``: bytes."""
        self._left = _room() if most is None and files else most or 0
        self._files = files
        self._open: list[int] = []
        self._fetched: list[_Range] = []
        self._lock = threading.Lock()
        self._stopped = self._dropped = False
        self._chunks = self._missing()
        count = THREADS if files else 0
        self._threads = [threading.Thread(target=self._work, name="fetch", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    @property
    def num_bytes(self) -> int:
        """That are there and were not before."""
        return sum(each.size for each in self._fetched)

    def stop(self) -> None:
        """Begin no further chunk."""
        self._stopped = True
        if self._fetched:
            log.info("%.1f GB of the weights were read while torch was imported.", self.num_bytes / 1e9)

    def drop(self) -> None:
        """Take what was fetched out of the page cache, in a thread: the system takes a while."""
        self._stopped = True
        if not self._dropped:
            self._dropped = True
            threading.Thread(target=self._drop, name="drop", daemon=True).start()

    def wait(self) -> None:
        """Until all threads have ended."""
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        with contextlib.suppress(OSError):  # the load tells what is wrong with a file
            while True:
                with self._lock:
                    chunk = None if self._stopped else next(self._chunks, None)
                if chunk is None:
                    return
                os.posix_fadvise(chunk.fd, chunk.begin, chunk.size, os.POSIX_FADV_WILLNEED)
                os.pread(chunk.fd, 1, chunk.begin + chunk.size - 1)  # waits for the last of it
                with self._lock:
                    self._fetched.append(chunk)

    def _missing(self) -> Iterator[_Range]:
        """Chunks that are not in the page cache, file by file. A file of which the system does not tell is left out."""
        for file in self._files:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            self._open.append(fd)
            resident = resident_pages(fd)
            size = os.fstat(fd).st_size
            for begin in range(0, size if resident is not None else 0, CHUNK):
                chunk = _Range(fd, begin, min(CHUNK, size - begin))
                if resident is not None and resident[begin // PAGE : (begin + CHUNK) // PAGE].any():
                    continue
                self._left -= chunk.size
                if self._left < 0:
                    return
                yield chunk

    def _drop(self) -> None:
        self.wait()
        fetched, self._fetched = self._fetched, []
        for each in fetched:
            os.posix_fadvise(each.fd, each.begin, each.size, os.POSIX_FADV_DONTNEED)
        while self._open:
            os.close(self._open.pop())
