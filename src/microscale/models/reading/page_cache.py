"""Which part of a file the system holds in its page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

PAGE = mmap.PAGESIZE


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
