"""What ``attend_fused`` and ``attend_verify`` take beyond ``attend_short``: the heads' norms and rotation. ``paged``
launches them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from microscale.kernels.attention.spec import HeadsKind
from microscale.kernels.small.spec import HeadNorms, RopeTable

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEADS = 14
"""Query heads in a group, at most, of one new token: key and value follow them in a tile of 16 rows."""


def kinds(head_dim: int) -> tuple[HeadsKind, ...]:
    """What there are kernels for. Wide heads without norms spill, and no model has such, nor with values left alone."""
    normed = ((True, True, False), (True, True, True))
    return normed if head_dim > 128 else ((False, False, False), (True, False, False), *normed)


@dataclass(frozen=True)
class HeadTransform:
    """How the heads of a new token become queries, key and value."""

    rope: RopeTable
    norms: HeadNorms | None
    shared: bool
    """Whether keys are values too (K = V)."""

    def arguments(self, like: Tensor) -> tuple[Any, ...]:
        weights = (like, like) if self.norms is None else (self.norms.q_weight, self.norms.k_weight)
        epsilon = 0.0 if self.norms is None else self.norms.epsilon
        return self.rope.inverse_frequencies, *weights, self.rope.scale, epsilon

    @property
    def rotation(self) -> tuple[Tensor, float]:
        """What ``attend_verify`` takes."""
        return self.rope.inverse_frequencies, self.rope.scale

    @property
    def kind(self) -> HeadsKind:
        return self.norms is not None, self.norms is not None and self.norms.values, self.shared
