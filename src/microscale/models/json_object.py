"""Strict reading of JSON that came from outside: every wrong key names its file, and nothing has a silent default."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from microscale.errors import BadCheckpoint, BadConfig, BadSetting, MicroscaleError

T = TypeVar("T")

# The index of gpt-oss-120b, the largest JSON file we read, is 0.1 MB.
MAX_JSON_BYTES = 64 << 20

_KIND_NAMES: dict[type, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def parse_json(text: bytes) -> object:
    """JSON without the extensions that Python allows: no NaN, no key twice. Anything wrong is a ``ValueError``."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    data: dict[str, object] = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"key {key!r} appears twice")
        data[key] = value
    return data


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


@dataclass(frozen=True)
class JsonObject:
    """One object of a JSON file, and what its errors need to say."""

    source: str
    """The file, and for a nested object the key, as errors name it."""
    data: Mapping[str, object]
    overridden: frozenset[str] = frozenset()
    """Keys whose values came from the command line: an error there is a ``BadSetting``."""
    error: type[BadCheckpoint] = BadConfig

    def require(self, key: str, kind: type[T]) -> T:
        """The value of ``key``, which must be there and be of this kind. An integer is a number too, a bool is not."""
        if key not in self.data:
            raise self.error(f"{self.source} has no key {key!r}; it must be {_KIND_NAMES[kind]}.")
        value = self.data[key]
        if kind is float and type(value) is int and abs(value) <= 1 << 53:
            value = float(value)
        if type(value) is not kind or value in (math.inf, -math.inf):
            raise self.fault(key, f"must be {_KIND_NAMES[kind]}, not {_shown(value)}")
        return value

    def optional(self, key: str, kind: type[T], default: T) -> T:
        """As ``require``, but a key that is absent or null has the default that the file's own format defines."""
        return default if self.data.get(key) is None else self.require(key, kind)

    def nested(self, key: str) -> JsonObject:
        """The object under ``key``; an override of the outer key covers all that is in it."""
        inner = self.require(key, dict)
        overridden = frozenset(inner) if key in self.overridden else frozenset()
        return JsonObject(f"{self.source}, {key!r}", inner, overridden, self.error)

    def fault(self, key: str, what: str) -> MicroscaleError:
        """The error for a bad value of ``key``, in the class that tells who can fix it."""
        kind = BadSetting if key in self.overridden else self.error
        by = "the override of " if key in self.overridden else ""
        return kind(f"{self.source}: {by}{key!r} {what}.")


def read_json_object(path: Path, error: type[BadCheckpoint] = BadConfig) -> JsonObject:
    """The JSON object in the file ``path``."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise error(f"{path} is larger than {MAX_JSON_BYTES} bytes, which no such file is.")
        data = parse_json(path.read_bytes())
    except OSError as exc:
        raise error(f"{path} cannot be read: {exc.strerror}.") from exc
    except ValueError as exc:
        raise error(f"{path} is not valid JSON: {exc}.") from exc
    if not isinstance(data, dict):
        raise error(f"{path} must hold a JSON object, not {_shown(data)}.")
    return JsonObject(str(path), data, error=error)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
