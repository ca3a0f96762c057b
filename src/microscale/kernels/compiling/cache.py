"""The folder in which compiled kernels are kept: Triton's own cache, read more carefully.

Triton's key holds all that the machine code depends on (``source.cache_hash``), so an entry is right or is not found.
Three things are left, and ``KernelCache`` sees to them. An entry names its files by where they were written: a folder
that was moved, or copied into an image at another place, would be compiled again. A machine that lost power can leave
an entry whose files are short, and Triton would hand them to the GPU. And an entry that cannot be read is an error in
Triton 3.6 where it should be no entry.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager

from microscale.errors import BadSetting


class KernelCache(FileCacheManager):  # type: ignore[misc]  # Triton has no types
    """One entry of the cache. Its list of files carries their digests; one that differs makes it no entry."""

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        digests = {name: _digest(Path(path)) for name, path in group.items()}
        contents = json.dumps({"child_paths": group, "sha256": digests})
        return str(self.put(contents, f"__grp__{filename}", binary=False))

    def get_group(self, filename: str) -> dict[str, str] | None:
        folder = Path(self.cache_dir)
        try:
            listed = json.loads((folder / f"__grp__{filename}").read_bytes())
            names, digests = list(listed["child_paths"]), dict(listed.get("sha256", {}))
            for name, expected in digests.items():
                if _digest(folder / name) != expected:
                    return None
        except (OSError, ValueError, KeyError, TypeError):  # not there, cut short, or of another shape
            return None
        found = {name: str(folder / name) for name in names}
        return found if all(Path(path).is_file() for path in found.values()) else None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def use_cache(folder: Path | None = None) -> Path:
    """Let Triton keep kernels in ``folder``; without one in its own place (``TRITON_CACHE_DIR``). Gives the folder.

    Only what a launch needs is written: with every intermediate form a kernel takes 1 MB instead of 50 KB.
    """
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadSetting(f"--kernel-cache {folder} cannot be made: {error}.") from None
        knobs.cache.dir = str(folder.absolute())
    # Somebody's own manager (TRITON_CACHE_MANAGER) stays.
    if knobs.cache.manager_class is None:
        knobs.cache.manager_class = KernelCache
    knobs.compilation.store_binary_only = True
    return Path(knobs.cache.dir)


def folder_bytes(folder: Path) -> int:
    """Of all files in it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
