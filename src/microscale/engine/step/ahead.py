"""A step that is launched before anybody has read how many drafts the last one accepted: what the device finds out.

    last step    own token | draft | draft | draft         drawn in each place; drafts are accepted while they are what
    drawn        a         | b     | c     | d             was drawn a place before
    two accepted                                   ─►      next step    c | draft | draft | …    two places further on

The host lays such a step out as if nothing was accepted, with pages for the case that all was. The device then moves
each sequence on by what was (``moved``): its tokens, positions, slots and length, and the random numbers of its places.
Some twenty small kernels do that, of about 2 us each on an H200; to wait for the host takes 260.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

NO_TOKEN = -1
"""Fills up drafts that are shorter than the longest. No token that is drawn is equal to it."""
MOST_LAYOUTS = 256


@dataclass(frozen=True)
class Layout:
    """Rows of a step in which each sequence has its own token and a draft, end to end; int64 on the device."""

    first_rows: Tensor  # [sequences]
    owners: Tensor  # [rows]: the sequence
    sources: Tensor  # [rows]: where its token stands among the sequences' own ones and, behind them, all drafts
    drawn: Tensor  # [sequences, longest]: the row that draws the token which a draft guesses
    drafted: Tensor  # bool [sequences, longest]: whether there is such a draft


@dataclass(frozen=True)
class Ahead:
    """What such a step takes from the device, sequence by sequence in the order of its schedule."""

    own: Tensor  # int32 [sequences]: what the step before drew last
    accepted: Tensor  # int64 [sequences]: drafts of the step before
    drafts: Tensor  # int64 [sequences, longest], filled up with NO_TOKEN
    layout: Layout

    @cached_property
    def moved(self) -> Tensor:
        """int64 [rows]: how much further on each is than the host has it."""
        return self.accepted[self.layout.owners]

    def tokens(self) -> Tensor:
        """int64 [rows]."""
        return torch.cat((self.own, self.drafts.flatten()))[self.layout.sources]


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
        parts = (firsts, owners, sources, drawn, drafted)
        whole = self.there(torch.tensor([number for part in parts for number in part], dtype=torch.int64))
        first_rows, owner, source, row, real = whole.split([len(part) for part in parts])
        shape = sequences, longest
        return Layout(first_rows, owner, source, row.view(shape), real.view(shape).bool())

    def drafts(self, drafts: Sequence[Sequence[int]]) -> Tensor:
        """int64 [sequences, longest]: those that the host knows."""
        longest = max(map(len, drafts))
        rows = [[*draft, *[NO_TOKEN] * (longest - len(draft))] for draft in drafts]
        return self.there(torch.tensor(rows, dtype=torch.int64).view(len(rows), longest))

    def there(self, tensor: Tensor) -> Tensor:
        """On the device, without waiting: torch keeps the pinned memory until it was read."""
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def count_accepted(tokens: Tensor, drafts: Tensor, layout: Layout) -> Tensor:
    """int64 [sequences]: how many drafts of each are what was drawn. ``tokens``: drawn, row by row."""
    return (tokens[layout.drawn] == drafts).cumprod(1).sum(1)
