"""Tensors without numbers, of which outlines of models are made: a shape and a size in bytes, and no torch.

A model's constructor handles them as it handles tensors. What it computes from them it leaves to ``Ops.computed``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, eq=False)
class ShapeOnly:
    """One tensor. Whoever asks for more than the constructors of models do finds no such attribute."""

    shape: tuple[int, ...]
    itemsize: int
    table: ShapeOnly | None = None
    """Of which this is some rows."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def dim(self) -> int:
        return len(self.shape)

    def to(self, dtype: object) -> ShapeOnly:
        """As in the checkpoint, in whatever type it is used."""
        return self

    def float(self) -> ShapeOnly:
        return self

    def view(self, *sizes: int) -> ShapeOnly:
        known = math.prod(size for size in sizes if size != -1)
        count = math.prod(self.shape)
        return replace(self, shape=tuple(count // known if size == -1 else size for size in sizes))

    def reshape(self, shape: tuple[int, ...]) -> ShapeOnly:
        return self.view(*shape)

    def transpose(self, first: int, second: int) -> ShapeOnly:
        sizes = list(self.shape)
        sizes[first], sizes[second] = sizes[second], sizes[first]
        return replace(self, shape=tuple(sizes))

    def __getitem__(self, rows: slice | list[int] | None) -> ShapeOnly:
        """Some rows, rows by their numbers, or (``None``) one more axis in front."""
        if rows is None:
            return replace(self, shape=(1, *self.shape))
        if isinstance(rows, list):
            return replace(self, shape=(len(rows), *self.shape[1:]))
        count = len(range(*rows.indices(self.shape[0])))
        return ShapeOnly((count, *self.shape[1:]), self.itemsize, self)
