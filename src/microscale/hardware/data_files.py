"""Reads the JSON files of this folder strictly: every key is there, none is unknown, every value has its type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from microscale.errors import BadSetting


def read_object(file: Path, remedy: str) -> dict[str, Any]:
    """``remedy``: what helps, as the end of the error text."""
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BadSetting(f"{file} cannot be read as JSON ({error}); {remedy}.") from None
    if not isinstance(data, dict):
        raise BadSetting(f"{file} holds no JSON object; {remedy}.")
    return data


def to_record(file: Path, kind: Any, data: Any, remedy: str) -> Any:
    """``data`` as a dataclass of this type."""
    try:
        record = msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise BadSetting(f"{file} holds a record that is wrong: {error}; {remedy}.") from None
    if msgspec.json.decode(msgspec.json.encode(record)) != data:
        raise BadSetting(f"{file} has a key that is unknown or missing; {remedy}.")
    return record
