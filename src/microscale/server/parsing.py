"""From a body's bytes to a request, or to an error that names the field at fault."""

from __future__ import annotations

import re
from typing import TypeVar

from pydantic import ValidationError

from microscale.server.faults import BadField
from microscale.server.protocol import MANY, Body

T = TypeVar("T", bound=Body)
MAX_CONTAINERS = 2 * MANY
"""Lists and objects of one body, 3 us to make each; counted by their brackets, those in text included."""


def parse(kind: type[T], body: bytes) -> T:
    """The request, or an error that names the field at fault."""
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        raise BadField(f"The body cannot be read: it has more than {MAX_CONTAINERS} brackets.", None)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None


# Pydantic puts the chosen variant of a union into the place of an error.
_VARIANTS = {"str", "int", "float", "bool", "system", "developer", "user", "assistant", "tool"}
_FIELD = re.compile(r"[a-z_]+")


def _explain(error: ValidationError) -> BadField:
    first = error.errors(include_url=False, include_input=False)[0]
    where = _path(first["loc"])
    field = (first.get("ctx") or {}).get("field")
    if field is not None and first["type"] in ("unsupported_field", "unsupported_value", "no_stream"):
        where = f"{where}.{field}" if where else str(field)
    if not where:
        return BadField(f"The body cannot be read: {first['msg']}.", None)
    return BadField(f"{where[:200]}: {first['msg']}.", where[:200])


def _path(loc: tuple[int | str, ...]) -> str:
    """``messages[0].content``, without the variants."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _FIELD.fullmatch(part) and part not in _VARIANTS:
            path += f".{part}" if path else part
    return path
