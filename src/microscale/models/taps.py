"""Taps: where a draft head reads the residual stream of the model that it drafts for.

A tap is the number of layers before it. Tap 0 is the embedding, tap i what layer i - 1 (counted from 0) gave, and tap
``num_layers`` what the last layer gave, before the final norm. So tap i is transformers' ``hidden_states[i]``, but for
the last one: transformers gives the final norm there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Taps:
    """Which taps are wanted, and where a forward pass puts them: all tokens' rows, whichever of them give logits.

    The tensor is the caller's and keeps its place, so that a captured graph fills the same one in every step.
    """

    places: tuple[int, ...]
    rows: Tensor  # [tokens, places * hidden]: the taps side by side, in the order of ``places``

    @classmethod
    def empty(cls, places: tuple[int, ...], tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Taps:
        return cls(places, torch.empty((tokens, len(places) * hidden), dtype=dtype, device=device))

    @cached_property
    def _columns(self) -> dict[int, Tensor]:
        return dict(zip(self.places, self.rows.chunk(len(self.places), dim=1), strict=True))

    def first(self, tokens: int) -> Taps:
        """The rows of the first tokens."""
        return Taps(self.places, self.rows[:tokens])

    def at(self, place: int) -> Tensor | None:
        """Where this tap goes, ``[tokens, hidden]``; ``None`` where it is not wanted."""
        return self._columns.get(place)
