"""One file that several threads read at any offset, past the page cache where the system allows that.

A file is untrusted and may change while it is read: every range is as long as requested, or it is an error.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from microscale.errors import BadCheckpoint

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE
BLOCK = 4096
"""Direct reads want offset, length and memory in multiples of the disk's logical block: 512 bytes or this."""
CACHED_SHARE = 0.99
"""A file that is in the page cache as a whole is read from there: memory is faster, and nothing is added to it."""


class ReadMethod(StrEnum):
    """How a file is read."""

    DIRECT = "direct"
    CACHED = "from the page cache"
    PLAIN = "through the page cache"


@dataclass(frozen=True)
class Stamp:
    """Identifies one state of a file."""

    device: int
    inode: int
    size: int
    changed_ns: int

    @staticmethod
    def of(stat: os.stat_result) -> Stamp:
        return Stamp(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


class FileChanged(BadCheckpoint):
    """The file was written to or cut off while it was read."""


class WeightFile:
    """An open file. ``stamp`` is the state in which its header was read; any other is refused."""

    def __init__(self, path: Path, stamp: Stamp, *, direct: bool = True) -> None:
        self.path = path
        self._stamp = stamp
        self._plain = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._direct: int | None = None
        self._resident: NDArray[np.bool_] | None = None
        """Page by page whether it was in the page cache when it was opened, if the system reports that."""
        self.way = ReadMethod.PLAIN
        try:
            self.check_unchanged()
            self._resident = resident_pages(self._plain)
            if self._resident is not None and np.count_nonzero(self._resident) * PAGE >= CACHED_SHARE * stamp.size:
                self.way = ReadMethod.CACHED
            elif direct:
                self._open_direct()
        except BaseException:
            self.close()
            raise

    @classmethod
    def cold(cls, path: Path) -> WeightFile:
        """A file as it is now, read past the page cache whatever is in that."""
        file = cls(path, Stamp.of(path.stat()))
        file._resident = None
        if file.way is ReadMethod.CACHED:
            file._open_direct()
        return file

    @property
    def size(self) -> int:
        return self._stamp.size

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for fd in (self._plain, self._direct):
            if fd is not None:
                os.close(fd)
        self._direct = None

    def check_unchanged(self) -> None:
        if Stamp.of(os.fstat(self._plain)) != self._stamp:
            raise FileChanged(f"{self.path} changed while it was read; load it again when nothing writes to it.")

    def read_into(self, memory: memoryview, offset: int, end: int) -> None:
        """Fill ``memory`` from ``offset``, both whole blocks, at least up to byte ``end`` of the file.

        A read may bring less than was requested: the rest is requested again, from the last whole block.
        """
        done = 0
        while offset + done < end:
            got = self._read(memory[done:], offset + done)
            if offset + done + got >= end:
                break
            if got < BLOCK:
                raise FileChanged(
                    f"{self.path} ends at byte {offset + done + got}, before byte {end} that its header promised; "
                    f"it was cut off while it was read."
                )
            done += got // BLOCK * BLOCK
        if self.way is ReadMethod.PLAIN and hasattr(os, "posix_fadvise"):
            # What was read stays in the page cache otherwise, as large as the model.
            os.posix_fadvise(self._plain, offset, len(memory), os.POSIX_FADV_DONTNEED)

    def is_direct(self, offset: int, size: int) -> bool:
        """Whether a range is read past the page cache, so far as is known before it is read."""
        return self._direct is not None and self.way is ReadMethod.DIRECT and not self._was_resident(offset, size)

    def _read(self, memory: memoryview, offset: int) -> int:
        direct = self._direct
        if direct is not None and self.is_direct(offset, len(memory)):
            try:
                return os.preadv(direct, [memory], offset)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self._fall_back(error)  # some file systems open a file and then refuse to read it so
        return os.preadv(self._plain, [memory], offset)

    def _was_resident(self, offset: int, size: int) -> bool:
        """A range that was in the page cache as a whole is read from there too, whatever of the file was not."""
        pages = self._resident
        return pages is not None and bool(pages[offset // PAGE : -(-(offset + size) // PAGE)].all())

    def _open_direct(self) -> None:
        try:
            self._direct = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except (OSError, AttributeError) as error:  # a system without O_DIRECT has no such name
            self._fall_back(error)
            return
        self.way = ReadMethod.DIRECT
        if Stamp.of(os.fstat(self._direct)) != self._stamp:  # another file has taken its name
            raise FileChanged(f"{self.path} was replaced while it was read; load it again.")

    def _fall_back(self, error: Exception) -> None:
        self.way = ReadMethod.PLAIN
        reason = error.strerror if isinstance(error, OSError) else "this system has none"
        _warn_once(str(self.path.parent), f"direct reads are refused there ({reason})")


_warned: set[tuple[str, str]] = set()


def _warn_once(folder: str, reason: str) -> None:
    """Once for a folder: a checkpoint has many files."""
    if (folder, reason) not in _warned:
        _warned.add((folder, reason))
        log.warning("%s: %s; reading %s, which is dropped behind.", folder, reason, ReadMethod.PLAIN)


# ---- the page cache --------------------------------------------------------------------------------------------------


def resident_bytes(fd: int) -> int | None:
    """Bytes of an open file that are in the page cache; ``None`` where the system does not report it."""
    pages = resident_pages(fd)
    return None if pages is None else min(int(np.count_nonzero(pages)) * PAGE, os.fstat(fd).st_size)


def resident_pages(fd: int) -> NDArray[np.bool_] | None:
    """Page by page whether an open file is in the page cache, by ``mincore``; ``None`` where the system does not
    report it.

    For files that the user could not write Linux answers "all of it", which hides what others read.
    """
    stat = os.fstat(fd)
    size = stat.st_size
    if size == 0:
        return np.empty(0, dtype=np.bool_)
    if os.geteuid() not in (0, stat.st_uid):
        return None
    try:
        with mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapped:
            pages = np.empty(-(-size // PAGE), dtype=np.uint8)
            view = np.frombuffer(mapped, dtype=np.uint8)
            libc = ctypes.CDLL(None, use_errno=True)
            failed = libc.mincore(
                ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
            )
            del view  # a mapping with views cannot be closed
    except (OSError, ValueError, AttributeError):
        return None
    return None if failed else (pages & 1).astype(np.bool_)
