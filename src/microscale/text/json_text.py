"""JSON as text: a model's arguments are checked, and passed on as it wrote them."""

from __future__ import annotations

import json
from typing import NoReturn


class BadCall(ValueError):
    """The text is not a well-formed call."""


def is_json(text: str) -> bool:
    """Whether ``text`` is JSON, without the extensions that Python allows."""
    try:
        # Numbers stay text: Python refuses to read integers of more than 4,300 digits, JSON does not.
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
