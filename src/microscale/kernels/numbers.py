"""Whole numbers that launches are made of.

Triton's own functions for them are its language's too: a call from here takes microseconds, and a prompt's layer makes
dozens of them.
"""

from __future__ import annotations


def cdiv(number: int, by: int) -> int:
    """``number / by``, rounded up."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not less than ``number``."""
    return 1 << max(0, number - 1).bit_length()
