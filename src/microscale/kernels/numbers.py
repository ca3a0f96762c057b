"""Integer arithmetic for launches, and constants that modules without torch read.

Triton's own ``cdiv`` and ``next_power_of_2`` belong to its language too: a call from here takes microseconds, and a
prompt's layer makes dozens of them. The kernels' modules must not import torch: a process that only compiles them does
without.
"""

from __future__ import annotations

PEAK_BIAS = 0x400B
"""A scale byte plus a row's half-word of ``peaks`` is 0x4000 plus its distance from 11 octaves below the peak."""

FRAGMENT_ROWS = 16
"""Rows of a tile of packed weights (``layouts``)."""

MAX_TOP_LOGPROBS = 20
"""The most top log-probabilities of a request. The server checks it in a process without torch."""


def cdiv(number: int, by: int) -> int:
    """``number / by``, rounded up."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not less than ``number``."""
    return 1 << max(0, number - 1).bit_length()
