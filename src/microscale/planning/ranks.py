"""Sums over the ranks that hold the parts of a model, and greedy sampling from a vocabulary that is split over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from microscale.kernels.dense.reference import summarise
from microscale.kernels.dense.spec import Logits
from microscale.kernels.sampling.spec import Sampled, SampleStatus

if TYPE_CHECKING:
    from torch import Tensor


class RankSums(Protocol):
    """All ranks call ``sum`` with the same shapes in the same order; see ``parallel/group.Group``."""

    @property
    def world(self) -> int: ...

    @property
    def uncapturable(self) -> str | None:
        """Why no CUDA graph can hold a sum; ``None`` where one can."""

    def sum(self, part: Tensor) -> Tensor:
        """The sum over all ranks, with the same bits on each. ``part`` may be overwritten."""


class NoSums:
    """Nothing is added up: one rank holds everything, or the kernels of one rank of several are only listed."""

    uncapturable = None

    def __init__(self, world: int) -> None:
        self.world = world

    def sum(self, part: Tensor) -> Tensor:
        return part


ALONE = NoSums(1)

__all__ = ["ALONE", "NoSums", "RankSums", "as_one_block", "likeliest", "summarise"]


def as_one_block(logits: Logits) -> tuple[Tensor, Tensor, Tensor]:
    """What all blocks say together: largest logit, its row, sum of exp(logit - largest), one each a token."""
    largest = logits.block_max.amax(dim=1)
    at = (logits.block_max == largest[:, None]).int().argmax(dim=1, keepdim=True)  # the first of equals
    rows = logits.block_argmax.gather(1, at)[:, 0]
    return largest, rows, (logits.block_sum * (logits.block_max - largest[:, None]).exp()).sum(dim=1)


def likeliest(logits: Logits) -> Sampled:
    """The likeliest token of each row and its log-probability, from the blocks alone."""
    largest, rows, total = as_one_block(logits)
    status = torch.where(largest.isfinite(), int(SampleStatus.OK), int(SampleStatus.NON_FINITE))
    return Sampled(rows.int(), -total.log(), status.int())
