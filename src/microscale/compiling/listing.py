"""Keeps the list of a model's kernels from start to start, beside the kernels themselves.

To make the list means to walk through the model at every size: 0.8 s of Python on an H200's host, while reading the
weights wants the interpreter too. A list is named by a digest of all that it depends on: what it was made for, every
file of this package, Triton's version. One that cannot be read, or whose kernels Triton no longer reads as they are
written there, is made anew. So a wrong list could at worst lack a kernel, which is then compiled when it is launched.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import triton

import microscale
from microscale.compiling.job import PLAIN_VALUES, kernel_from_json, kernel_to_json
from microscale.kernels.launch import Kernel, Launch

log = logging.getLogger(__name__)
FOLDER = "microscale-lists"
"""Inside of the kernel cache, whose own entries are named by hashes."""
MOST_LISTS = 32
"""The newest stay. One takes some 50 KB."""
READ_BY_LISTS = (".py", ".json")
"""Files of this package that can change what is launched: code, tiles, measured times."""
ODD = 3
"""An integer that neither is 1 nor divides by 16."""
WIDE = {"i64": 1 << 32, "u64": 1 << 63}
"""The least integers of which Triton makes these types, of an argument that names none. Both divide by 16."""


@dataclass
class _Pointer:
    """What Triton asks of a tensor."""

    dtype: str
    address: int

    def data_ptr(self) -> int:
        return self.address


def kept_or_made(
    folder: Path, made_for: object, make: Callable[[], Mapping[Kernel, Launch]]
) -> Mapping[Kernel, Launch]:
    """The launches to load. ``folder``: the kernel cache; ``made_for``: all that ``make`` goes by, beside the code."""
    try:
        path = folder / FOLDER / f"{digest(made_for)}.json"
    except (OSError, TypeError) as error:
        log.warning("The list of kernels cannot be kept for the next start: %s", error)
        return make()
    found = _read(path)
    if found is not None:
        return found
    made = make()
    try:
        _write(path, made)
    except (OSError, TypeError) as error:
        log.info("The list of kernels is not kept for the next start: %s", error)
    return made


def digest(made_for: object) -> str:
    """The same in every process of the same installation; another where anything differs."""
    text = json.dumps([triton.__version__, _package_files(), plain(made_for)])
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _package_files() -> list[tuple[str, int, int]]:
    """Name, size and time of each file that lists depend on."""
    return sorted(_walk(Path(microscale.__file__).parent))


def _walk(folder: Path) -> Iterator[tuple[str, int, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(Path(entry.path))
            elif entry.name.endswith(READ_BY_LISTS):
                stamp = entry.stat()
                yield entry.path, stamp.st_size, stamp.st_mtime_ns


def plain(value: object) -> object:
    """A value in the types of JSON; sets and mappings in an order that every process gives them."""
    if isinstance(value, Enum):
        return [type(value).__name__, value.name]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, [[field.name, plain(getattr(value, field.name))] for field in fields(value)]]
    if isinstance(value, Mapping):
        return _ordered([plain(key), plain(each)] for key, each in value.items())
    if isinstance(value, set | frozenset):
        return _ordered(map(plain, value))
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, PLAIN_VALUES):
        return value
    raise TypeError(f"a list of kernels cannot be named by a {type(value).__name__}.")


def _ordered(values: Iterable[object]) -> list[object]:
    return sorted(values, key=json.dumps)


def _read(path: Path) -> dict[Kernel, Launch] | None:
    """The kernels of a list, each with a launch that loads it; ``None``: there is no list, or not a good one."""
    try:
        found = {kernel: launch_of(kernel) for kernel in map(kernel_from_json, json.loads(path.read_bytes()))}
        good = all(launch.kernel() == kernel for kernel, launch in found.items())
        os.utime(path)  # it is among the newest
    except FileNotFoundError:
        return None
    except Exception as error:  # cut short, of another shape, or of functions that are gone or changed: of any kind
        log.info("A kept list of kernels cannot be used and is made anew: %s", error)
        return None
    return found if good else None


def launch_of(kernel: Kernel) -> Launch:
    """A launch that can be loaded and not started: arguments that Triton reads as those of the kernel."""
    pairs = zip(kernel.fn.params, kernel.specialisation, strict=True)
    values = {param.name: _stand_in(kind, assumed) for param, (kind, assumed) in pairs}
    return Launch(kernel.fn, (1,), (), values, dict(kernel.options), None, None)


def _stand_in(kind: str, assumed: Any) -> Any:
    """A value of Triton's type ``kind`` of which Triton assumes just that."""
    if kind == "constexpr":
        return assumed
    divides = assumed == "D"
    if kind.startswith("*"):
        return _Pointer(kind.removeprefix("*"), 16 if divides else ODD)
    if kind.startswith("fp"):
        return 0.5
    if kind == "u1":
        return True
    return WIDE.get(kind, 0) + (16 if divides else ODD)


def _write(path: Path, kernels: Iterable[Kernel]) -> None:
    """Whole or not at all. Older lists than the newest ``MOST_LISTS`` are removed."""
    text = json.dumps([kernel_to_json(kernel) for kernel in kernels])
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    part.replace(path)
    by_age = sorted(path.parent.iterdir(), key=_modified, reverse=True)
    for old in by_age[MOST_LISTS:]:
        old.unlink(missing_ok=True)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another start has removed it
        return 0.0
