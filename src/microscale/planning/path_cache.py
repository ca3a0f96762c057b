"""What a layer kind runs, remembered: the oracle is asked once for each kind of batch, not in every step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from microscale.hardware import Gpu
from microscale.kernels.op import Implementation, Path, Reason
from microscale.planning.paths import path_for, pick
from microscale.planning.plan import BUCKETS

OpT = TypeVar("OpT", bound=Implementation[Any])
SpecT = TypeVar("SpecT")
KeyT = TypeVar("KeyT")
FoundT = TypeVar("FoundT")
PathT = TypeVar("PathT", bound=Path[Any])

MAX_REMEMBERED = 1024
"""Kinds of batches that a layer kind remembers what was picked for: decoding has few, prompts may have any."""


@dataclass(frozen=True)
class LayerChoice(Generic[OpT, SpecT]):
    """The specs and implementations of one layer kind, by bucket."""

    specs: tuple[SpecT, ...]
    implementations: tuple[OpT, ...]
    gpu: Gpu

    def at(self, tokens: int, **changes: Any) -> tuple[OpT, SpecT]:
        """The implementation for so many tokens, and the spec that it is given."""
        bucket = min(bisect_left(BUCKETS, tokens), len(BUCKETS) - 1)
        spec: Any = self.specs[bucket]
        return self.implementations[bucket], replace(spec, tokens=tokens, **changes)

    def picked(self, paths: Callable[[OpT], Sequence[PathT]], tokens: int, **changes: Any) -> tuple[OpT, SpecT, PathT]:
        """And the path."""
        entry, spec = self.at(tokens, **changes)
        return entry, spec, path_for(paths(entry), spec, self.gpu)

    def fused(
        self, paths: Callable[[OpT], Sequence[PathT]], tokens: int, **changes: Any
    ) -> tuple[OpT, SpecT, PathT] | Reason:
        """The same for a fused form, which there need not be: then why not."""
        entry, spec = self.at(tokens, **changes)
        found = pick(paths(entry), spec, self.gpu)
        return (entry, spec, found.path) if found.path is not None else f"{entry.name} {found.refusal}"


class PathCache(dict[KeyT, FoundT]):
    """What was found for each kind of batch. A look-up is a dictionary's own."""

    def __init__(self, find: Callable[[KeyT], FoundT]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, key: KeyT) -> FoundT:
        if len(self) >= MAX_REMEMBERED:
            self.clear()
        found = self[key] = self._find(key)
        return found
