"""A step that is launched before the host has read how many drafts the last one accepted: what the device works out.

    last step    own token | draft | draft | draft         drawn in each place; drafts are accepted while they are what
    drawn        a         | b     | c     | d             was drawn a place before
    two accepted                                   ─►      next step    c | draft | draft | …    two places further on

The host lays such a step out as if nothing was accepted, with pages for the case that all was. The device then moves
each sequence on by what was: its tokens, positions, slots and length, and the random numbers of its places. Two small
kernels do that (``kernels/drafts``), and a third for a draft head; to wait for the host takes 260 us on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from microscale.planning.following import NO_TOKEN, Followed, Layout

if TYPE_CHECKING:
    from torch import Tensor

Ahead = Followed
"""What such a step takes from the device."""
MOST_LAYOUTS = 256


class Layouts:
    """Layouts by the lengths of drafts. Those of fixed lengths are made and copied once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[int, ...], Layout] = {}

    def of(self, lengths: Sequence[int]) -> Layout:
        key = tuple(lengths)
        if key not in self._known:
            if len(self._known) >= MOST_LAYOUTS:
                self._known.clear()
            self._known[key] = self._make(key)
        return self._known[key]

    def _make(self, lengths: Sequence[int]) -> Layout:
        sequences, longest = len(lengths), max(lengths)
        firsts = list(accumulate((1 + length for length in lengths[:-1]), initial=0))
        owners = [at for at, length in enumerate(lengths) for _ in range(1 + length)]
        sources: list[int] = []
        drawn: list[int] = []
        drafted: list[int] = []
        for at, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
            begin = sequences + at * longest
            sources += [at, *range(begin, begin + length)]
            drawn += [first + min(place, length) for place in range(longest)]
            drafted += [place < length for place in range(longest)]
        parts = (firsts, lengths, owners, sources, drawn, drafted)
        whole = self.to_device(torch.tensor([number for part in parts for number in part], dtype=torch.int64))
        first_rows, count, owner, source, row, real = whole.split([len(part) for part in parts])
        shape = sequences, longest
        return Layout(first_rows, count, owner, source, row.view(shape), real.view(shape).bool())

    def drafts(self, drafts: Sequence[Sequence[int]]) -> Tensor:
        """int64 [sequences, longest]: those that the host knows."""
        longest = max(map(len, drafts))
        rows = [[*draft, *[NO_TOKEN] * (longest - len(draft))] for draft in drafts]
        return self.to_device(torch.tensor(rows, dtype=torch.int64).view(len(rows), longest))

    def to_device(self, tensor: Tensor) -> Tensor:
        """On the device, without waiting: torch keeps the pinned memory until it was read."""
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
