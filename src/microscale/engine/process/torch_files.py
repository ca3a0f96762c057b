"""Whether an import of torch will read its files from the disk. To be asked before it is imported."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from pathlib import Path

from microscale.models.reading.page_cache import resident_pages

PROBES = 16


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
