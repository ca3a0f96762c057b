"""What runs between two steps with drafts when the host has not read the first.

``follow``    how many drafts of each sequence are what was drawn; from that its own next token, and its next drafts
``move_on``   a step that the host laid out as if nothing was accepted, brought to where its sequences are
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

NO_TOKEN = -1
"""Fills up drafts that are shorter than the longest. No token that is drawn is equal to it."""


@dataclass(frozen=True)
class Layout:
    """Rows of a step in which each sequence has its own token and a draft, end to end; int64 on the device."""

    first_rows: Tensor  # [sequences]
    lengths: Tensor  # [sequences]: of the drafts
    owners: Tensor  # [rows]: the sequence
    sources: Tensor  # [rows]: where its token is among the sequences' own ones and, behind them, all drafts
    drawn: Tensor  # [sequences, longest]: the row that draws the token which a draft guesses
    drafted: Tensor  # bool [sequences, longest]: whether there is such a draft


@dataclass(frozen=True)
class Followed:
    """What the next step takes from the device, sequence by sequence in the order of its schedule; int64."""

    own: Tensor  # [sequences]: what the step before drew last
    accepted: Tensor  # [sequences]: drafts of the step before
    drafts: Tensor  # [sequences, longest], filled up with NO_TOKEN
    moved: Tensor  # [rows]: how much further on each is than the host has it
    layout: Layout

    def tokens(self) -> Tensor:
        """int64 [rows]."""
        return torch.cat((self.own, self.drafts.flatten()))[self.layout.sources]


@dataclass(frozen=True)
class Pages:
    """Page tables of one or more kinds of layers, row r of each the r-th sequence's."""

    flat: Tensor  # int32
    starts: tuple[int, ...]
    """Where the table of each kind begins in it: each as far behind the one before."""
    max_pages: int
    page_size: int

    @property
    def stride(self) -> int:
        return self.starts[1] - self.starts[0] if len(self.starts) > 1 else 0


@dataclass(frozen=True)
class Standing:
    """The tensors of the next step, as far as they depend on what was accepted: rows, and behind them others'."""

    positions: Tensor  # int64 [rows]
    slots: Tensor  # int64 [kinds, rows]
    lens: Tensor  # int32 or int64 [sequences]
    tokens: Tensor | None = None  # int64 [rows]: written, if there are any
    drafts: Tensor | None = None  # int64 [longest, sequences]: the same
