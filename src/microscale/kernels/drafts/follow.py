"""Launches between two steps with drafts: one each, a program a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from microscale.kernels.drafts import follow_jit
from microscale.kernels.drafts.spec import NO_TOKEN, Followed, Layout, Pages, Standing
from microscale.kernels.launch import launch

if TYPE_CHECKING:
    from torch import Tensor

PLACES = 16
"""Rows of a sequence: its own token and up to 15 drafts."""
OPTIONS = {"num_warps": 1}


def follow(
    tokens: Tensor, last: Layout, last_drafts: Tensor, layout: Layout, drafts: Tensor, given: Tensor | None = None
) -> Followed:
    """As the reference."""
    sequences, longest, rows = len(layout.first_rows), layout.drafted.shape[1], len(layout.owners)
    drafts, last_drafts = _by_rows(drafts), _by_rows(last_drafts)
    # One allocation, of which each part is a view.
    made = torch.empty(sequences * (2 + longest) + rows, dtype=torch.int64, device=tokens.device)
    own, accepted, next_drafts, moved = made.split([sequences, sequences, sequences * longest, rows])
    next_drafts = next_drafts.view(sequences, longest)
    arguments = (
        tokens, last.first_rows, last.lengths, last_drafts, layout.first_rows, layout.lengths, drafts,
        accepted if given is None else given, own, accepted, next_drafts, moved,
        last_drafts.stride(0), drafts.stride(0), longest,
    )  # fmt: skip
    constants: dict[str, Any] = {"PLACES": PLACES, "GIVEN": given is not None, "NO_TOKEN": NO_TOKEN}
    launch(follow_jit.follow, (sequences,), arguments, constants, OPTIONS)
    return Followed(own, accepted, next_drafts, moved, layout)


def move_on(followed: Followed, standing: Standing, pages: Pages) -> None:
    layout, drafts = followed.layout, followed.drafts
    nothing = standing.positions
    tokens = nothing if standing.tokens is None else standing.tokens
    shown = standing.slots if standing.drafts is None else standing.drafts
    arguments = (
        followed.own, followed.accepted, drafts, layout.first_rows, layout.lengths, standing.positions, standing.slots,
        standing.lens, tokens, shown, pages.flat[pages.starts[0] :], pages.stride, standing.slots.stride(0),
        shown.stride(0), pages.max_pages, pages.page_size, drafts.shape[1],
    )  # fmt: skip
    constants: dict[str, Any] = {
        "PLACES": PLACES, "KINDS": len(pages.starts), "TOKENS": standing.tokens is not None,
        "DRAFTS": standing.drafts is not None,
    }  # fmt: skip
    launch(follow_jit.move_on, (len(followed.accepted),), arguments, constants, OPTIONS)


def _by_rows(drafts: Tensor) -> Tensor:
    """The drafts of a sequence side by side."""
    return drafts if drafts.shape[1] < 2 or drafts.stride(1) == 1 else drafts.contiguous()
