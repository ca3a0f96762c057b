"""Numbers of tokens that steps with prompts are filled up to, so that few captured graphs serve all of them.

Every number up to 16 is one, then each is at most 12 % more than the smallest number that runs in it. Which kernels run
depends on the number of tokens, and a step must run the same ones filled up as it would by itself: so wherever they
change there is the end of a bucket.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from math import ceil, log

PROMPT_GRAPH_TOKENS = 2048
"""Above it a step takes the GPU longer than it takes the host to launch its kernels one by one. An H200 computes 2048
tokens of gpt-oss-20b in 22 to 26 ms, and a host needs 26 to 31 for their launches (docs/lab/start.md)."""
EVERY_SIZE_TO = 16
GROWTH = 1.12
ALIGNED_FROM, ALIGNMENT = 64, 8
"""From so many tokens on sizes are multiples of a matrix instruction's columns."""


def sizes(most: int) -> list[int]:
    """Ends of buckets up to ``most``, wherever kernels change."""
    found = list(range(1, min(EVERY_SIZE_TO, most) + 1))
    while found[-1] < most:
        size = int((found[-1] + 1) * GROWTH)
        if size > ALIGNED_FROM:
            size = size // ALIGNMENT * ALIGNMENT
        found.append(min(max(size, found[-1] + 1), most))
    return found


def buckets(most: int, kernels: Callable[[int], Hashable]) -> list[int]:
    """``sizes``, and each number of tokens after which others than before run. ``kernels``: what a step of so many
    tokens runs. It is asked at the ends of buckets, and where two differ within: they change once between them."""
    ends = sizes(most)
    found = list(ends)
    for low, high in pairwise(ends):
        found += _changes(low, high, kernels)
    return sorted(set(found))


def _changes(low: int, high: int, kernels: Callable[[int], Hashable]) -> list[int]:
    """The last numbers before a change, from ``low`` on and below ``high``."""
    if kernels(low) == kernels(high):
        return []
    if high - low == 1:
        return [low]
    middle = (low + high) // 2
    return _changes(low, middle, kernels) + _changes(middle, high, kernels)


def kernel_ends(ends: Sequence[int], kernels: Callable[[int], Hashable]) -> list[int]:
    """The buckets after which other kernels run, and the last."""
    return [*(low for low, high in pairwise(ends) if kernels(low) != kernels(high)), ends[-1]]


def coarse(ends: Sequence[int], stops: Sequence[int], ratio: float, above: int = 0) -> list[int]:
    """Few of the buckets: all ``stops`` greater than ``above``, and as many between two of them that each is about
    ``ratio`` times the smallest number of tokens that runs in it, or less. The largest first."""
    found: set[int] = set()
    for stop in stops:
        if stop > above:
            growth = stop / (above + 1)
            parts = max(1, ceil(log(growth) / log(ratio)))
            found |= {_nearest(ends, (above + 1) * growth ** (part / parts)) for part in range(1, parts + 1)}
            above = stop
    return sorted(found, reverse=True)


def _nearest(ends: Sequence[int], size: float) -> int:
    return min(ends, key=lambda end: abs(log(end / size)))


def bucket(ends: Sequence[int], tokens: int) -> int | None:
    """The bucket of so many tokens; ``None`` where they are too many."""
    place = bisect_left(ends, tokens)
    return ends[place] if place < len(ends) else None
