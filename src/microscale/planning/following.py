"""What runs between two steps with drafts, for engines: kernels on a GPU, their references on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from microscale.kernels.drafts import follow as kernels
from microscale.kernels.drafts import reference
from microscale.kernels.drafts.spec import NO_TOKEN, Followed, Layout, Pages, Standing
from microscale.kernels.launch import Kernel, Launch, recording

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NO_TOKEN", "Followed", "Layout", "Pages", "Standing", "follow", "move_on", "record_following"]


def follow(
    tokens: Tensor, last: Layout, last_drafts: Tensor, layout: Layout, drafts: Tensor, given: Tensor | None = None
) -> Followed:
    """See ``kernels/drafts/reference.py``."""
    if tokens.device.type == "cpu":
        return reference.follow(tokens, last, last_drafts, layout, drafts, given)
    return kernels.follow(tokens, last, last_drafts, layout, drafts, given)


def move_on(followed: Followed, standing: Standing, pages: Pages) -> None:
    """From where the host takes the sequences to be to where they are."""
    if standing.positions.device.type == "cpu":
        reference.move_on(followed, standing, pages)
    else:
        kernels.move_on(followed, standing, pages)


def record_following(num_kinds: int) -> dict[Kernel, Launch]:
    """Every kernel of these that a model with this many kinds of layers starts, and its draft head."""

    def longs(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    layout = Layout(longs(1), longs(1), longs(2), longs(2), longs(1, 1), longs(1, 1).bool())
    table = torch.empty(64, dtype=torch.int32, device="meta")
    with recording() as found:
        for given in (None, longs(1)):
            followed = follow(table, layout, longs(1, 1), layout, longs(1, 1), given)
        step = Standing(longs(2), longs(num_kinds, 2), table[:1], tokens=longs(2))
        move_on(followed, step, Pages(table, tuple(range(num_kinds)), 4, 16))
        head = Standing(longs(2), longs(1, 2), longs(1), drafts=longs(1, 1))
        move_on(followed, head, Pages(table, (0,), 4, 16))
    return found
