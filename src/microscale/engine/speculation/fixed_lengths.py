"""Lengths of drafts by the number of sequences, as users of vLLM write them: ``{"1-16": 3, "17-512": 0}``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from microscale.errors import BadSetting
from microscale.models.config import MAX_DRAFT

_RANGE = re.compile(r"[0-9]{1,9}(-[0-9]{1,9})?", re.ASCII)


def parse_lengths(key: str, value: Any) -> tuple[tuple[int, int], ...]:
    """From how many sequences on drafts have how many tokens. A list ``[[1, 16, 3], [17, 512, 0]]`` says the same.

    As in vLLM, sizes between two ranges and after the last are as those before them, so only where a range begins
    counts.
    """
    entries = _entries(value)
    ranges = sorted(entries) if entries and all(map(_is_range, entries)) else []
    apart = all(before[-2] < after[0] for before, after in pairwise(ranges))
    if not ranges or not apart:
        raise BadSetting(
            f"--speculative-config: {key} is {str(value)[:80]}, not ranges of sequences that do not overlap, each with "
            f'the tokens of a draft, 0 to {MAX_DRAFT}: {{"1-16": 3, "17-512": 0}}.'
        )
    return tuple((entry[0], entry[-1]) for entry in ranges)


def _entries(value: Any) -> list[list[Any]]:
    if isinstance(value, dict):
        return [[*_sizes(key), count] for key, count in value.items()]
    return [entry if isinstance(entry, list) else [None] for entry in value] if isinstance(value, list) else []


def _sizes(key: str) -> list[Any]:
    """Of ``1-16`` or ``1``."""
    return [int(part) for part in key.split("-")] if _RANGE.fullmatch(key) else [None]


def _is_range(entry: Sequence[Any]) -> bool:
    """First and last size, or one, and the tokens of a draft."""
    numbers = all(isinstance(each, int) and not isinstance(each, bool) for each in entry)
    return numbers and len(entry) in (2, 3) and 1 <= entry[0] <= entry[-2] and 0 <= entry[-1] <= MAX_DRAFT
