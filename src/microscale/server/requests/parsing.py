"""Parses a body into a request, or raises an error that names the field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from microscale.server import error_texts
from microscale.server.error_texts import BadField
from microscale.server.requests.base import MANY, Body, Ignored, ignored_keys

T = TypeVar("T", bound=Body)
MAX_CONTAINERS = 2 * MANY
"""Maximum number of lists and objects in a body, which take 3 us each; counted by brackets, even those in text."""


def parse(kind: type[T], body: bytes, *, strict: bool = False) -> tuple[T, list[Ignored]]:
    """The request and its ignored keys. ``strict`` refuses all but the harmless ones."""
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        raise error_texts.unreadable_body(f"it has more than {MAX_CONTAINERS} brackets")
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None
    ignored = ignored_keys(request)
    if strict:
        refuse_unknown(ignored)
    return request, ignored


def refuse_unknown(ignored: Sequence[Ignored]) -> None:
    for key in ignored:
        if not key.is_harmless:
            raise error_texts.unknown_field(key.path)


# Pydantic includes the chosen variant of a union in the location of an error.
_VARIANTS = {"str", "int", "float", "bool", "system", "developer", "user", "assistant", "tool"}
_FIELD = re.compile(r"[a-z_]+")
_OURS = ("unsupported_value", "unsupported_parameter", "conflict")
"""Errors that our own validators raise; they name the key."""
_CODES = {
    "missing": "missing_required_parameter",
    "unsupported_value": "unsupported_value",
    "unsupported_parameter": "unsupported_parameter",
    "literal_error": "unsupported_value",
}


def _explain(error: ValidationError) -> BadField:
    first = error.errors(include_url=False, include_input=False)[0]
    where = _path(first["loc"])
    field = (first.get("ctx") or {}).get("field")
    if field is not None and first["type"] in _OURS:
        where = f"{where}.{field}" if where else str(field)
    if not where:
        return error_texts.unreadable_body(first["msg"])
    return BadField(f"{where[:200]}: {first['msg']}.", where[:200], _code(first))


def _code(error: ErrorDetails) -> str:
    """OpenAI's name for the kind of error."""
    kind = error["type"]
    return _CODES.get(kind) or ("invalid_type" if kind.endswith("_type") else "invalid_value")


def _path(loc: tuple[int | str, ...]) -> str:
    """``messages[0].content``, without the variants."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _FIELD.fullmatch(part) and part not in _VARIANTS:
            path += f".{part}" if path else part
    return path
