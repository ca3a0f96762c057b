"""A checkpoint of which one rank reads its own part, straight from the files: ``read`` gives that part of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from microscale.models.checkpoint import Checkpoint
from microscale.models.reading.nan_check import NanCheck
from microscale.models.reading.parts import Assembly, Parts, ranges
from microscale.models.reading.read_ahead import ReadAhead
from microscale.models.reading.targets import dtype_of
from microscale.models.safetensors_header import TensorEntry

if TYPE_CHECKING:
    from torch import Tensor


class ShardedCheckpoint(Checkpoint):
    """The files of ``whole``, which was checked, seen by one rank."""

    def __init__(self, whole: Checkpoint, parts: Parts) -> None:
        self.folder = whole.folder
        self.entries = whole.entries
        self._ahead: ReadAhead | None = None
        self._parts = parts
        self._ranges = {name: ranges(self.entries[name], part) for name, part in parts.items()}

    def read_entries(self, names: Sequence[str]) -> list[TensorEntry]:
        """What is read of these tensors: whole tensors and ranges."""
        found: list[TensorEntry] = []
        for name in names:
            parts = self._ranges.get(name)
            found += [self.entries[name]] if parts is None else [each.entry for each in parts]
        return found

    @contextmanager
    def reading(
        self, names: Sequence[str], device: torch.device, on_read: Callable[[int, int], None] = lambda done, total: None
    ) -> Iterator[None]:
        with self.reading_entries(self.read_entries(names), device, on_read):
            yield

    def read(self, name: str, device: torch.device | str) -> Tensor:
        parts = self._ranges.get(name)
        if parts is None:
            return super().read(name, device)
        entry, ahead, on = self.entries[name], self._ahead, torch.device(device)
        assembly = Assembly(entry, self._parts[name], dtype_of(entry), on)
        if ahead is not None and ahead.device == on:
            for each in parts:
                data = ahead.take(each.entry.name)
                self._nan.look(entry, data)
                assembly.add(each, data)
            self._on_read(ahead.taken, ahead.total)
            return assembly.done()
        with ReadAhead([each.entry for each in parts], on) as alone:
            for each in parts:
                data = alone.take(each.entry.name)
                NanCheck(together=1).look(entry, data)
                assembly.add(each, data)
        return assembly.done()
