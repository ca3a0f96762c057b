"""What a model asks of the other ranks that hold its other parts: sums. One rank alone asks nobody.

And what is drawn from a vocabulary that is spread over ranks, where each says only the largest logit of its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from microscale.errors import Unsupported
from microscale.kernels.dense.reference import summarise
from microscale.kernels.dense.spec import Logits
from microscale.kernels.sampling.spec import Sampled, Status

if TYPE_CHECKING:
    from torch import Tensor


class Ranks(Protocol):
    """All ranks call the same methods in the same order; see ``parallel/group.Group``."""

    def sum(self, part: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each. ``part`` may be overwritten."""

    @property
    def world(self) -> int: ...

    def fuses(self, part: Tensor) -> bool:
        """Whether ``sum_add_norm`` takes this part, in one launch."""

    def sum_add_norm(self, part: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """The sum, added to the residual stream: its norm times ``weight``, and the stream. Where ``fuses`` says so."""

    def uncapturable(self, tokens: int) -> str | None:
        """Why no CUDA graph can hold the sums of a step of so many tokens; ``None`` where one can."""


class Alone:
    """One rank that holds everything: nothing is launched."""

    world = 1

    def sum(self, part: Tensor) -> Tensor:
        return part

    def fuses(self, part: Tensor) -> bool:
        return False

    def sum_add_norm(self, part: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        raise Unsupported("One rank adds up nothing; ask fuses first.")

    def uncapturable(self, tokens: int) -> str | None:
        return None


class Absent(Alone):
    """Others that are not there: one rank's part runs alone, with sums that cost nothing. What comes out means
    nothing."""

    def __init__(self, world: int) -> None:
        self.world = world


ALONE = Alone()

__all__ = ["ALONE", "Absent", "Alone", "Ranks", "as_one_block", "likeliest", "summarise"]


def as_one_block(logits: Logits) -> tuple[Tensor, Tensor, Tensor]:
    """What all blocks say together: largest logit, its row, sum of exp(logit - largest), one each a token."""
    largest = logits.block_max.amax(dim=1)
    at = (logits.block_max == largest[:, None]).int().argmax(dim=1, keepdim=True)  # the first of equals
    rows = logits.block_argmax.gather(1, at)[:, 0]
    return largest, rows, (logits.block_sum * (logits.block_max - largest[:, None]).exp()).sum(dim=1)


def likeliest(logits: Logits) -> Sampled:
    """The likeliest token of each row and its log-probability, from the blocks alone."""
    largest, rows, total = as_one_block(logits)
    status = torch.where(largest.isfinite(), int(Status.OK), int(Status.NON_FINITE))
    return Sampled(rows.int(), -total.log(), status.int())
