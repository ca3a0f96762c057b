"""What a model asks of the other ranks that hold its other parts: sums and logits. One rank alone asks nobody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from microscale.kernels.dense.reference import summarise
from microscale.kernels.dense.spec import Logits


class Ranks(Protocol):
    """All ranks call the same methods in the same order; see ``parallel/group.Group``."""

    @property
    def world(self) -> int: ...

    def sum(self, part: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each. ``part`` may be overwritten."""

    def columns(self, part: Tensor, total: int) -> Tensor | None:
        """What the ranks hold of ``[rows, total]``, in their order, put together on the first: others get ``None``."""


class Alone:
    """One rank that holds everything, or is to run without the others: nothing is launched."""

    world = 1

    def sum(self, part: Tensor) -> Tensor:
        return part

    def columns(self, part: Tensor, total: int) -> Tensor:
        return part


ALONE = Alone()


@dataclass(frozen=True)
class Absent:
    """Others that are not there: one rank's part is timed alone, with sums that cost nothing. What comes out means
    nothing."""

    world: int

    def sum(self, part: Tensor) -> Tensor:
        return part

    def columns(self, part: Tensor, total: int) -> Tensor:
        return torch.nn.functional.pad(part, (0, total - part.shape[1]))


def gathered(part: Logits, vocab: int, ranks: Ranks) -> Logits:
    """The logits of the whole vocabulary on the first rank, which samples, from each rank's rows of lm_head."""
    if ranks.world == 1:
        return part
    whole = ranks.columns(part.values, vocab)
    return part if whole is None else summarise(whole)
