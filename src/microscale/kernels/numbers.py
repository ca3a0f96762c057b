"""Whole numbers that launches are made of.

Triton's own functions for them are its language's too: a call from here takes microseconds, and a prompt's layer makes
dozens of them. Constants that a layout and the kernels that read it share stand here too: the kernels' modules must not
import torch, which a process that only compiles them does without.
"""

from __future__ import annotations

PEAK_BIAS = 0x400B
"""A scale byte plus a row's half-word of ``peaks`` is 0x4000 plus its distance from 11 octaves below the peak."""

FRAGMENT_ROWS = 16
"""Rows of a tile of packed weights (``layouts``)."""


def cdiv(number: int, by: int) -> int:
    """``number / by``, rounded up."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not less than ``number``."""
    return 1 << max(0, number - 1).bit_length()
