"""What is true between two steps with drafts. It also runs on CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from microscale.kernels.drafts.spec import NO_TOKEN, Followed, Layout, Pages, Standing

if TYPE_CHECKING:
    from torch import Tensor


def count_accepted(tokens: Tensor, drafts: Tensor, layout: Layout) -> Tensor:
    """int64 [sequences]: how many drafts of each are what was drawn. ``tokens``: drawn, row by row."""
    return (tokens[layout.drawn] == drafts).cumprod(1).sum(1)


def follow(
    tokens: Tensor, last: Layout, last_drafts: Tensor, layout: Layout, drafts: Tensor, given: Tensor | None = None
) -> Followed:
    """``tokens``: drawn in the rows of ``last``, where ``last_drafts`` were verified. ``drafts``: of which each
    sequence has as many as ``layout`` says. ``given``: what is accepted, whatever was drawn."""
    accepted = count_accepted(tokens, last_drafts, last) if given is None else given
    own = tokens[last.first_rows + accepted].long()
    drafts = torch.where(layout.drafted, drafts[:, : layout.drafted.shape[1]], NO_TOKEN)
    return Followed(own, accepted, drafts, accepted[layout.owners], layout)


def move_on(followed: Followed, standing: Standing, pages: Pages) -> None:
    layout, sequences = followed.layout, len(followed.accepted)
    rows, size = len(layout.owners), pages.page_size
    if standing.tokens is not None:
        standing.tokens[:rows].copy_(followed.tokens())
    positions = standing.positions[:rows].add_(followed.moved)
    places = positions // size + layout.owners * pages.max_pages
    for slots, start in zip(standing.slots, pages.starts, strict=True):
        slots[:rows] = pages.flat[start + places].long() * size + positions % size
    standing.lens[:sequences].add_(followed.accepted)
    if standing.drafts is not None:
        standing.drafts[: followed.drafts.shape[1], :sequences].copy_(followed.drafts.T)
