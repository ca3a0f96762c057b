"""Which path runs a batch of a layer kind: the oracle is asked once per kind of batch, not in every step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from microscale.errors import Unsupported
from microscale.hardware import Gpu
from microscale.kernels.op import Implementation, Path, Reason
from microscale.planning.paths import path_for, pick
from microscale.planning.plan import BUCKETS

OpT = TypeVar("OpT", bound=Implementation[Any])
SpecT = TypeVar("SpecT")
KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")
PathT = TypeVar("PathT", bound=Path[Any])

MAX_REMEMBERED = 1024
"""Kinds of batches that a cache holds. Decoding has few; prompts may have any length."""


@dataclass(frozen=True)
class LayerChoice(Generic[OpT, SpecT]):
    """The specs and implementations of one layer kind, by bucket."""

    specs: tuple[SpecT, ...]
    implementations: tuple[OpT, ...]
    gpu: Gpu

    def at(self, tokens: int, **changes: Any) -> tuple[OpT, SpecT]:
        """The implementation for this many tokens, and the spec that it gets."""
        bucket = min(bisect_left(BUCKETS, tokens), len(BUCKETS) - 1)
        spec: Any = self.specs[bucket]
        return self.implementations[bucket], replace(spec, tokens=tokens, **changes)

    def path(self, paths: Callable[[OpT], Sequence[PathT]], tokens: int, **changes: Any) -> tuple[OpT, SpecT, PathT]:
        """The same, with the path."""
        entry, spec = self.at(tokens, **changes)
        return entry, spec, path_for(paths(entry), spec, self.gpu)

    def fused_path(
        self, paths: Callable[[OpT], Sequence[PathT]], tokens: int, **changes: Any
    ) -> tuple[OpT, SpecT, PathT] | Reason:
        """The path of a fused form, or why there is none."""
        entry, spec = self.at(tokens, **changes)
        picked = pick(paths(entry), spec, self.gpu)
        return (entry, spec, picked.path) if picked.path is not None else f"{entry.name} {picked.refusal}"


class PathCache(dict[KeyT, ValueT]):
    """What was found for each kind of batch. A look-up is a dictionary's own."""

    def __init__(self, find: Callable[[KeyT], ValueT]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, key: KeyT) -> ValueT:
        if len(self) >= MAX_REMEMBERED:
            self.clear()
        value = self[key] = self._find(key)
        return value


class FusedPathCache(PathCache[KeyT, ValueT | Reason]):
    """The same for a fused form, which not every batch has."""

    def why_not(self, key: KeyT) -> Reason | None:
        value = self[key]
        return value if isinstance(value, str) else None

    def need(self, key: KeyT, check: str) -> ValueT:
        """The path. ``check`` is the method that a caller asks first."""
        value = self[key]
        if isinstance(value, str):
            raise Unsupported(f"The fused form does not run this batch: {value}; check {check} first.")
        return value
