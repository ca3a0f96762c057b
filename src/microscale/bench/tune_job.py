"""One case that ``microscale tune`` measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from microscale.hardware.tiles.tuned import Section


@dataclass(frozen=True)
class Problem:
    """A case with its tensors. Both functions start kernels with whatever tile is on trial."""

    work: Callable[[], object]
    """What is timed."""
    error: Callable[[], float]
    """The relative RMS error of one call against the reference."""
    max_error: float
    calls: int = 1
    """Of the layer, in ``work``: several with weights of their own, so that none are read from L2."""


@dataclass(frozen=True)
class Job:
    section: Section[Any, Any]
    key: Any
    """Of the row that the best tile gets, and under which candidates are on trial."""
    about: str
    tiles: Sequence[Any]
    prepare: Callable[[str], Problem]
    """With tensors on this device."""
