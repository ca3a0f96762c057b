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
import time
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
"""A part of the memory that is available, and bytes: a fast disk reads no more in the seconds of an import."""
CORES = 8
PROBES = 16
NOTHING = "Weights are not fetched ahead: %s."


def why_not() -> str | None:
    """Why fetching does not pay here, if it does not. To be asked before torch is imported."""
    cores = len(os.sched_getaffinity(0))
    if cores < CORES:
        return f"{cores} CPU cores are too few, it takes {CORES}"
    is_cached = torch_is_cached()
    if is_cached is None:
        return "this system does not tell whether torch's own files are in the page cache"
    return None if is_cached else "torch's own files are not in the page cache and come from the disk first"


def torch_is_cached() -> bool | None:
    """Whether torch's modules are in the page cache, as after an import since the machine was started; ``None`` where
    the system does not tell. Some files are looked at, and none is waited for."""
    with contextlib.suppress(OSError, ImportError, ValueError):
        files = _torch_files()
        probed = files[:: max(1, len(files) // PROBES)]
        known = [each for each in map(_is_cached, probed) if each is not None]
        return 2 * sum(known) > len(known) if known else None
    return None


def _torch_files() -> list[Path]:
    """What an import of torch reads first: bytecode of this Python, or sources where there is none."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return []
    compiled = [] if found.cached is None else _like(Path(found.cached))
    return compiled or _like(Path(found.origin)) or sorted(Path(found.origin).parent.glob("lib/*.so"))


def _like(module: Path) -> list[Path]:
    """The files of a folder that are named as its ``__init__`` is."""
    return sorted(module.parent.glob(f"*{module.name.removeprefix('__init__')}"))


def _is_cached(file: Path) -> bool | None:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except (OSError, AttributeError):  # not every file system can be asked so: overlayfs and tmpfs cannot
        pages = resident_pages(fd)
        return None if pages is None else bool(pages[:1].all())
    finally:
        os.close(fd)


def start_fetching(config: EngineConfig, reason: str | None) -> Fetching:
    """Fetch a model's weights if they are to be read from here to a GPU's own memory. ``reason``: ``why_not``'s, which
    is then logged."""
    files = files_of(config)
    if reason is None and config.tensor_parallel_size > 1:
        reason = f"each of {config.tensor_parallel_size} ranks reads a part of its own"
    if files and reason is not None:
        log.info(NOTHING, reason)
        files = []
    return Fetching(files)


def files_of(config: EngineConfig) -> list[Path]:
    """The files whose weights will be read to memory of a GPU's own, as far as they are here."""
    if config.load_format == LoadFormat.DUMMY:
        return []
    with contextlib.suppress(Exception):  # the load tells what is wrong
        if not has_own_memory(config.device):
            return []
        return sorted(hub.resolve(config.model, offline=True).glob("*.safetensors"))
    return []


def _room() -> int:
    """Bytes that may be fetched. What the page cache holds of other files counts as free: on a machine that has read
    much since it was started, nearly nothing else is."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return min(MOST, int(value.split()[0]) * 1024 // FREE_SHARE)
    return 0


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
        self._begun_at = self._last_at = time.perf_counter()
        self._why_not = "there was no time"
        """For nothing to have been fetched."""
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
        """Begin no further chunk, and log what was fetched, or why nothing was."""
        self._stopped = True
        if self._fetched:
            seconds = self._last_at - self._begun_at
            log.info("%.2f GB of weights were fetched ahead, in %.2f s.", self.num_bytes / 1e9, seconds)
        elif self._files:
            log.info(NOTHING, self._why_not)

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
        try:
            while True:
                with self._lock:
                    chunk = None if self._stopped else next(self._chunks, None)
                if chunk is None:
                    return
                os.posix_fadvise(chunk.fd, chunk.begin, chunk.size, os.POSIX_FADV_WILLNEED)
                os.pread(chunk.fd, 1, chunk.begin + chunk.size - 1)  # waits for the last of it
                with self._lock:
                    self._fetched.append(chunk)
                    self._last_at = time.perf_counter()
        except OSError as error:  # the load tells what is wrong with a file
            self._why_not = error.strerror or "a file cannot be read"

    def _missing(self) -> Iterator[_Range]:
        """Chunks that are not in the page cache, file by file. A file of which the system does not tell is left out."""
        for file in self._files:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            self._open.append(fd)
            resident = resident_pages(fd)
            if resident is None:
                self._why_not = "this system does not tell what of them is in the page cache"
                continue
            size = os.fstat(fd).st_size
            for begin in range(0, size, CHUNK):
                if resident[begin // PAGE : (begin + CHUNK) // PAGE].any():
                    self._why_not = "they are in the page cache already"
                    continue
                chunk = _Range(fd, begin, min(CHUNK, size - begin))
                self._left -= chunk.size
                if self._left < 0:
                    self._why_not = "too little memory is free"
                    return
                yield chunk

    def _drop(self) -> None:
        self.wait()
        fetched, self._fetched = self._fetched, []
        for each in fetched:
            os.posix_fadvise(each.fd, each.begin, each.size, os.POSIX_FADV_DONTNEED)
        while self._open:
            os.close(self._open.pop())
