"""What is true of sums over ranks: in float32, in the order of the ranks, rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from microscale.kernels.small import reference as small

if TYPE_CHECKING:
    from torch import Tensor


def sum_rows(parts: Sequence[Tensor]) -> Tensor:
    """``parts``: of each rank, in order."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def sum_add_norm(parts: Sequence[Tensor], residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The sum, added to the residual stream: its norm times ``weight``, and the stream."""
    return small.add_rms_norm(sum_rows(parts), residual, weight, epsilon)
