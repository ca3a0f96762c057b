"""How long drafts should be: a pure function of what the next step costs and of how likely drafts are accepted.

A step of S sequences with n drafts in all takes ``verify[n]``, and the drafter, in passes of a token each, ``draft[k]``
for drafts of up to k tokens. It gives each sequence one token and the drafts that are accepted. What is to be as large
as can be is tokens over time:

    (S + c1 + c2 + … + cn) / (verify[n] + draft[k])        c: the chance of each drafted token, the likeliest first

The chances of one draft only fall from token to token (a token counts if all before it were accepted), so the n
likeliest tokens of all drafts are beginnings of drafts: taking them in the order of their chances finds the best
lengths of all, for each n and k.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from operator import neg, truediv


@dataclass(frozen=True)
class Costs:
    """The next step of a batch, in any unit of time."""

    sequences: int
    verify: Sequence[float]
    """By the number of drafts in all, from none on."""
    draft: Sequence[float] = (0.0,)
    """What the drafter takes, by the length of the longest draft, from none on; the last holds for longer ones."""
    sizes: int | None = None
    """Numbers of drafts that are tried from one token for all to two for all, and so on; ``None``: every number. Each
    number is a step of its own size, which a GPU captures when it comes up first."""

    def drafting(self, longest: int) -> float:
        return self.draft[min(longest, len(self.draft) - 1)]

    @cached_property
    def least_chance(self) -> float:
        """No drafts pay whose likeliest token has a chance below this: n tokens give at most n times as much."""
        alone, first = self.verify[0], self.drafting(1)
        more = (self.sequences * (us + first - alone) / (alone * n) for n, us in enumerate(self.verify) if n)
        return min(more, default=float("inf"))

    @cached_property
    def most_gain(self) -> float:
        """How many times faster than none drafts can be of which every token is accepted."""
        given = ((n, us + self.drafting(-(-n // self.sequences))) for n, us in enumerate(self.verify) if n)
        alone = self.sequences / self.verify[0]
        return max(((self.sequences + n) / us / alone for n, us in given), default=0.0)

    @cached_property
    def times(self) -> Mapping[int, Sequence[float]]:
        """By the longest draft, of the lengths that are worth looking at: a step's times, by the number of drafts in
        all. Only the longest where drafting costs the same for all."""
        last = max(len(self.draft) - 1, 1)
        flat = len(set(self.draft[1:])) <= 1
        lengths = (max(len(self.verify), last),) if flat else range(1, last + 1)
        return {longest: [us + self.drafting(longest) for us in self.verify] for longest in lengths}


def best_lengths(chances: Sequence[Sequence[float]], costs: Costs, least_gain: float = 1.0) -> list[int]:
    """Tokens to draft for each request. ``chances``: of each, of the first token of a draft, the first two, …; they do
    not rise. No drafts at all where these would not give ``least_gain`` times as many tokens a second as none.

    64 requests with five tokens each take 0.1 ms, or 0.4 where drafting costs by the token: so sums and quotients are
    made by whole lists.
    """
    if max((own[0] for own in chances if own), default=0.0) < costs.least_chance:
        return [0] * len(chances)
    every = 1 if costs.sizes is None else max(1, len(chances) // costs.sizes)
    best, chosen = least_gain * costs.sequences / costs.verify[0], (0, 0.0, 0)
    for longest, times in costs.times.items():
        ranked = sorted(chain.from_iterable(own[:longest] for own in chances), reverse=True)
        given = accumulate(ranked, initial=float(costs.sequences))
        # The first is that of no drafts, whose time has no drafting in it.
        rates = list(map(truediv, given, times))[every::every]
        top = max(rates, default=0.0)
        if top > best:
            count = (rates.index(top) + 1) * every
            best, chosen = top, (longest, ranked[count - 1], count)
    return _allot(chances, *chosen)


def _allot(chances: Sequence[Sequence[float]], longest: int, least: float, count: int) -> list[int]:
    """The ``count`` likeliest tokens, none of which is less likely than ``least``, nor beyond the longest draft. Of
    equals the first."""
    if not count:
        return [0] * len(chances)
    # Chances do not rise, so their negatives are in order.
    lengths = [bisect_left(own, -least, hi=min(longest, len(own)), key=neg) for own in chances]
    left = count - sum(lengths)
    for at, own in enumerate(chances):
        while left and lengths[at] < min(longest, len(own)) and own[lengths[at]] == least:
            lengths[at] += 1
            left -= 1
    return lengths


def rate(lengths: Sequence[int], chances: Sequence[Sequence[float]], costs: Costs) -> float:
    """Tokens over time of a step with drafts of these lengths."""
    given = sum(sum(own[:length]) for own, length in zip(chances, lengths, strict=True))
    return (costs.sequences + given) / (costs.verify[sum(lengths)] + costs.drafting(max(lengths, default=0)))
