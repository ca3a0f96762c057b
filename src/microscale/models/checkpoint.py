"""Reads the tensors of a checkpoint folder, one at a time, and only after all of them were checked.

Opening reads headers and index; ``check`` compares every tensor with what the model expects; ``read`` brings one in.
Inside of ``reading`` the tensors that come next are read meanwhile (``reading/``). Apart from what the caller holds, at
most a layer, there is never more than that window. With several ranks, each reads its own parts straight from the
files (``of_rank``).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from microscale.errors import BadCheckpoint, BadSetting
from microscale.models.json_object import read_json_object
from microscale.models.reading.chunks import DiskReads
from microscale.models.reading.nan_check import TOGETHER, NanCheck
from microscale.models.reading.parts import PartAssembly, Range, RankPart, ranges
from microscale.models.reading.read_ahead import ReadAhead
from microscale.models.reading.targets import Targets, dtype_of
from microscale.models.safetensors_header import TensorEntry, read_header

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NEAR = 4
"""Names that the report of a missing tensor lists."""

_SHARD_NUMBER = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that the model expects."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    """The types it may have, in safetensors' words."""
    other_shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes that it may have as well."""


class Checkpoint:
    """The safetensors files of one folder: a single file, shards with an index, or shards alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: Mapping[str, TensorEntry] = _open(folder)
        self._parts: Mapping[str, RankPart] = {}
        self._ranges: Mapping[str, list[Range]] = {}
        self._ahead: ReadAhead | None = None

    def of_rank(self, parts: Mapping[str, RankPart]) -> Checkpoint:
        """The same files for one rank: ``read`` gives the part of a tensor that is in ``parts``, and all of others."""
        mine = copy(self)
        parts = {name: part for name, part in parts.items() if not _is_one_for_all(self.entries[name].shape, part)}
        mine._parts = parts
        mine._ranges = {name: ranges(self.entries[name], part) for name, part in parts.items()}
        return mine

    def under(self, prefix: str) -> Checkpoint:
        """The same files, but only the tensors whose names begin with ``prefix``."""
        part = copy(self)
        part.entries = {name: entry for name, entry in self.entries.items() if name.startswith(prefix)}
        return part

    def check(
        self, expected: Iterable[TensorSpec], left_out: tuple[str, ...] = (), unread: tuple[str, ...] = ()
    ) -> tuple[int, int]:
        """Every expected tensor is there, in shape and type, and no other is but those whose names begin with
        ``left_out`` or end with ``unread``.

        Returns how many of the two there are.
        """
        names = set()
        for spec in expected:
            names.add(spec.name)
            entry = self.entries.get(spec.name)
            if entry is None:
                raise BadCheckpoint(
                    f"{self.folder} lacks tensor {spec.name!r}, which its config asks for; {self._near(spec.name)}."
                )
            if entry.shape not in (spec.shape, *spec.other_shapes):
                raise BadCheckpoint(
                    f"{entry.file}: tensor {spec.name!r} has shape {list(entry.shape)}, "
                    f"but the config asks for {list(spec.shape)}."
                )
            if entry.dtype not in spec.dtypes:
                raise BadCheckpoint(
                    f"{entry.file}: tensor {spec.name!r} has type {entry.dtype}, not {' or '.join(spec.dtypes)}."
                )
        others = [name for name in self.entries if name not in names]
        rest = [name for name in others if not name.startswith(left_out)]
        for name in rest:
            if not name.endswith(unread):
                raise BadCheckpoint(
                    f"{self.entries[name].file}: tensor {name!r} is no part of the model that the config describes."
                )
        return len(others) - len(rest), len(rest)

    def _near(self, name: str) -> str:
        """What the checkpoint has instead of a tensor that is missing: names with most of its beginning."""
        stem, dot = name, ""
        while stem:
            stem, dot, _ = stem.rpartition(".")
            near = [other for other in self.entries if other.startswith(stem + dot)]
            if near:
                more = f" and {len(near) - NEAR} more" if len(near) > NEAR else ""
                return f"it has {', '.join(repr(other) for other in near[:NEAR])}{more}"
        return "it has no tensor"

    @contextmanager
    def reading(
        self, names: Sequence[str], device: torch.device, on_read: Callable[[int, int], None] = lambda done, total: None
    ) -> Iterator[None]:
        """Read ahead, in the order of ``names``, which are all that will be read.

        ``on_read`` gets the bytes that were taken and their total.
        """
        with ReadAhead(self.read_entries(names), device) as ahead:
            self._ahead, self._on_read, self._nan = ahead, on_read, NanCheck(TOGETHER[device.type])
            on_read(0, ahead.total)
            try:
                yield
                self._nan.settle()
            finally:
                self._ahead = None
        ways = ", ".join(sorted(set(ahead.ways.values())))
        speed = ahead.taken / max(ahead.seconds, 1e-9) / 1e9
        log.info("Read %.2f GB of weights in %.1f s, %.2f GB/s (%s).", ahead.taken / 1e9, ahead.seconds, speed, ways)

    def read_entries(self, names: Sequence[str]) -> list[TensorEntry]:
        """What is read of these tensors: whole tensors and ranges."""
        entries: list[TensorEntry] = []
        for name in names:
            parts = self._ranges.get(name)
            entries += [self.entries[name]] if parts is None else [part.entry for part in parts]
        return entries

    def read(self, name: str, device: torch.device | str) -> Tensor:
        """One tensor on ``device``. NaN is refused: on a CPU at once, on a GPU before ``reading`` ends."""
        entries, ahead = self.read_entries([name]), self._ahead
        if ahead is None or ahead.device != torch.device(device) or not all(entry.name in ahead for entry in entries):
            with ReadAhead(entries, torch.device(device)) as alone:
                return self._take(name, alone, NanCheck(together=1), device)
        tensor = self._take(name, ahead, self._nan, device)
        self._on_read(ahead.taken, ahead.total)
        return tensor

    def _take(self, name: str, ahead: ReadAhead, nan: NanCheck, device: torch.device | str) -> Tensor:
        entry = self.entries[name]
        if name not in self._parts:
            tensor = ahead.take(name)
            nan.look(entry, tensor)
            return tensor
        assembly = PartAssembly(entry, self._parts[name], dtype_of(entry), device)
        for part in self._ranges[name]:
            data = ahead.take(part.entry.name)
            nan.look(entry, data)
            assembly.add(part, data)
        return assembly.done()


class FromCheckpoint:
    """Weights that come from a checkpoint. ``order``: the tensors that the model reads, in about its order."""

    def __init__(self, checkpoint: Checkpoint, order: Sequence[TensorSpec]) -> None:
        self._checkpoint = checkpoint
        self._order = [spec.name for spec in order]

    def reading(self, device: torch.device, on_read: Callable[[int, int], None]) -> AbstractContextManager[None]:
        """Inside of it tensors are read ahead, in order. ``on_read`` gets the bytes that were taken and their total."""
        return self._checkpoint.reading(self._order, device, on_read)

    @property
    def entries(self) -> Iterator[TensorEntry]:
        """What the model reads: tensors, and ranges of them."""
        return iter(self._checkpoint.read_entries(self._order))

    @property
    def all_entries(self) -> Iterator[TensorEntry]:
        """All tensors of the checkpoint."""
        return iter(self._checkpoint.entries.values())

    def read_one(self, name: str, device: torch.device) -> Tensor:
        return self._checkpoint.read(name, device)

    def read_through(
        self, device: torch.device, reads: DiskReads | None = None, targets: Targets | None = None
    ) -> None:
        """Bring every tensor to the device and keep none: what files and device allow."""
        entries = list(self.entries)
        with ReadAhead(entries, device, reads=reads, targets=targets) as ahead:
            for entry in entries:
                ahead.take(entry.name)


def check_overrides(
    folder: Path, overrides: Mapping[str, object], there: Iterable[TensorSpec], asked: Iterable[TensorSpec]
) -> None:
    """Refuse overrides of a checkpoint's config that ask for a tensor which it does not have."""
    known = {spec.name: spec for spec in there}
    for spec in asked:
        if known.get(spec.name) != spec:
            raise BadSetting(
                f"The overrides {', '.join(overrides)} ask for tensor {spec.name!r} in shape {list(spec.shape)}, "
                f"which {folder} does not have; such overrides need --load-format dummy."
            )


def _is_one_for_all(shape: Sequence[int], part: RankPart) -> bool:
    """Whether a tensor is a single number for all rows, so that every rank reads it, and not its part of the rows."""
    return math.prod(shape) == 1 and (part.axis >= len(shape) or any(piece.end > 1 for piece in part.pieces))


def _open(folder: Path) -> dict[str, TensorEntry]:
    if not folder.is_dir():
        raise BadCheckpoint(f"{folder} is not a folder.")
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file() and index.is_file():
        raise BadCheckpoint(f"{folder} has both {SINGLE} and {INDEX}; remove the one that is not the model.")
    if single.is_file():
        return read_header(single)
    if index.is_file():
        return _open_indexed(folder, index)
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise BadCheckpoint(f"{folder} has no *.safetensors file, so it has no weights.")
    _check_shard_numbers(folder, shards)
    return _merge(shards)


def _open_indexed(folder: Path, index: Path) -> dict[str, TensorEntry]:
    weight_map = read_json_object(index, BadCheckpoint).nested("weight_map")
    files = {name: weight_map.require(name, str) for name in weight_map.data}
    for name, file in files.items():
        # A plain name: an index must not reach outside its folder.
        if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise weight_map.fault(name, f"names {file!r}, which is not a *.safetensors file of the same folder")
        if not (folder / file).is_file():
            raise BadCheckpoint(f"{folder / file} is missing, although {INDEX} names it for tensor {name!r}.")
    entries = _merge([folder / file for file in sorted(set(files.values()))])
    for name, file in files.items():
        if name not in entries:
            raise BadCheckpoint(f"{folder / file} lacks tensor {name!r}, which {INDEX} says is there.")
    for name, entry in entries.items():
        if files.get(name) != entry.file.name:
            says = f"puts it in {files[name]}" if name in files else "does not know"
            raise BadCheckpoint(f"{entry.file} holds tensor {name!r}, which {INDEX} {says}.")
    return entries


def _merge(shards: list[Path]) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in read_header(shard).items():
            if name in entries:
                raise BadCheckpoint(f"{shard}: tensor {name!r} is also in {entries[name].file.name}.")
            entries[name] = entry
    return entries


def _check_shard_numbers(folder: Path, shards: list[Path]) -> None:
    """Files that say "3 of 7" must all be there; numbers begin at 0 or at 1."""
    matches = [match for shard in shards if (match := _SHARD_NUMBER.search(shard.name))]
    if not matches:
        return
    numbers = {int(match[1]) for match in matches}
    total = max(int(match[2]) for match in matches)
    first = 0 if 0 in numbers else 1
    missing = next((number for number in range(first, first + total) if number not in numbers), None)
    if missing is not None:
        raise BadCheckpoint(f"{folder} lacks shard {missing} of {total} of its *.safetensors files.")
