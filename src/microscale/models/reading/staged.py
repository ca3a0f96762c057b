"""Weights that lie in a device's memory before the load asks for them: which ranges of which files, and where.

Who reads them ahead (the engine process, while it imports torch) owns that memory and registers itself here, once for
the process; a load copies from it what it finds, and has it freed at its end. Not passed as an argument: between the
two stand the engine's factory, ``prepare``, ``load`` and every family's weights, none of which has a use for it.
Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from microscale.models.reading.file import Stamp

if TYPE_CHECKING:
    import torch

WINDOW = 3 << 30


@dataclass(frozen=True)
class Extent:
    """Bytes ``[begin, end)`` of a file, at ``address`` of the device."""

    begin: int
    end: int
    address: int


class Stage(Protocol):
    """Who holds what was read ahead."""

    @property
    def device(self) -> str:
        """Such as ``cuda:0``."""

    @property
    def held(self) -> int:
        """Bytes of the device's memory."""

    @property
    def spare(self) -> int:
        """Bytes of the device's memory that neither this nor the load will take."""

    def settle(self) -> None:
        """Nothing is read ahead any more when this returns."""

    def extents(self, stamp: Stamp) -> list[Extent]:
        """What there is of a file in this state."""

    def drop(self) -> None:
        """Wait for copies out of it, and free all of it."""


_stage: Stage | None = None


def register(stage: Stage) -> None:
    global _stage
    _stage = stage


def held_on(device: torch.device) -> int:
    """Bytes of a device's memory that are taken now and free once the weights are loaded."""
    stage = _on(device)
    return 0 if stage is None else stage.held


def window_on(device: torch.device) -> int:
    """Bytes by which a load may read further ahead than it does else. Whoever takes tensors comes to what is not there
    after all that is, and the disk would wait for that."""
    stage = _on(device)
    return 0 if stage is None else min(stage.spare, WINDOW)


def extents_on(device: torch.device, stamp: Stamp) -> list[Extent]:
    """What lies there of a file that is in this state; in the file's order, neighbours joined."""
    stage = _on(device)
    return [] if stage is None else joined(stage.extents(stamp))


def drop() -> None:
    """Free what was read ahead, if there is anything."""
    global _stage
    stage, _stage = _stage, None
    if stage is not None:
        stage.drop()


def joined(extents: Iterable[Extent]) -> list[Extent]:
    """In the file's order, with those in one that follow each other both in the file and in memory."""
    found: list[Extent] = []
    for each in sorted(extents, key=lambda extent: extent.begin):
        last = found[-1] if found else None
        if last is not None and last.end == each.begin and last.address + last.end - last.begin == each.address:
            found[-1] = Extent(last.begin, each.end, last.address)
        else:
            found.append(each)
    return found


def _on(device: torch.device) -> Stage | None:
    if _stage is None or _stage.device != f"{device.type}:{device.index or 0}":
        return None
    _stage.settle()
    return _stage
