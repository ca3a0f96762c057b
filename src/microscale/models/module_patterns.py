"""Patterns of module names in the configs of quantised checkpoints: names, wildcards and regular expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from microscale.models.json_object import JsonObject


def read_patterns(file: JsonObject, key: str, *, required: bool = False) -> list[str]:
    found = file.require(key, list) if required else file.optional(key, list, [])
    patterns = [pattern for pattern in found if isinstance(pattern, str)]
    if len(patterns) != len(found):
        raise file.fault(key, "must be a list of module names")
    return patterns


def wildcards(patterns: Sequence[str], prefixes: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name without prefix matches one of the patterns: ``lm_head``, ``model.layers.0.router*``. A pattern
    without a star names a module and everything in it, wherever it is: ``mlp.gate`` is that of every layer."""
    bare = {without_prefix(pattern, prefixes) for pattern in patterns}
    plain = [f".{pattern}." for pattern in bare if "*" not in pattern]
    starred = (
        ".*".join(re.escape(piece) for piece in pattern.split("*")) for pattern in sorted(bare) if "*" in pattern
    )
    any_starred = re.compile("|".join(starred) or r"(?!)")

    def matches(name: str) -> bool:
        return any(pattern in f".{name}." for pattern in plain) or any_starred.fullmatch(name) is not None

    return matches


def expression(file: JsonObject, key: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        raise file.fault(key, f"holds {pattern!r}, which is no regular expression ({error})") from None


def any_match(patterns: Sequence[re.Pattern[str]], names: Sequence[str]) -> bool:
    return any(pattern.match(name) for pattern in patterns for name in names)


def within(name: str) -> list[str]:
    """A module's name and those of what it is in, the longest first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def without_prefix(name: str, prefixes: Sequence[str]) -> str:
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    return name.removeprefix(prefix)
