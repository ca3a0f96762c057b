"""What a JSON schema says about the text of one parameter: texts are written as they are, all other values as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from microscale.text.json_text import is_json

MAX_REFERENCES = 16
TEXT = "string"
ANYTHING: Mapping[str, Any] = {}
"""The schema that allows every value."""
NO_TYPES: frozenset[str] = frozenset()

_NUMBER = re.compile(r"-?[0-9]+([.eE].*)?")
_FIRST = {"{": "object", "[": "array", '"': TEXT, "t": "boolean", "f": "boolean", "n": "null"}
# Templates of Qwen 3.5 wrote these words in calls of earlier turns, and models learn from them.
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema without a reference at its top."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return ANYTHING
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root
        for key in reference.removeprefix("#").split("/")[1:]:
            schema = as_mapping(schema).get(key.replace("~1", "/").replace("~0", "~"))
    return ANYTHING


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Schemas come from clients: what is not an object where one must be says nothing."""
    return value if isinstance(value, Mapping) else ANYTHING


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A union's members, without references and unions; at least one."""
    found: list[Mapping[str, Any]] = []
    waiting, seen = [schema], set()
    while waiting:
        member = resolved(waiting.pop(), root)
        if id(member) in seen:
            continue
        seen.add(id(member))
        members = as_list(member.get("anyOf", member.get("oneOf")))
        if len(every := as_list(member.get("allOf"))) == 1:
            # How some generators of schemas write a reference.
            members = members or every
        kinds = as_list(member.get("type"))
        if members:
            waiting += reversed(members)
        elif kinds and listed(member) is None:
            found += [{**member, "type": kind} for kind in kinds]
        else:
            found.append(member)
    return found or [ANYTHING]


def listed(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """The values that a schema lists, if it does."""
    return [schema["const"]] if "const" in schema else as_list(schema.get("enum")) or None


def value_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a value may have; ``NO_TYPES`` if the schema does not say."""
    types: set[str] = set()
    for member in alternatives(schema, root):
        values = listed(member)
        if values is not None:
            types |= {type_of(json.dumps(value)) for value in values}
        elif isinstance(member.get("type"), str):
            types.add(member["type"])
        elif "properties" in member:
            types.add("object")
        else:
            return NO_TYPES
    return frozenset(types)


def type_of(value: str) -> str:
    """The type of a value that is written as JSON."""
    number = _NUMBER.match(value)
    if number is not None:
        return "number" if number[1] else "integer"
    return _FIRST[value[0]]


def as_json(text: str, types: frozenset[str]) -> str:
    """A parameter's text as JSON. What does not have one of ``types`` remains text."""
    value = text.strip()
    if types and TEXT not in types:
        value = _PYTHON.get(value, value)
        return value if is_json(value) else as_text(text)
    if not is_json(value) or (kind := type_of(value)) == TEXT:
        return as_text(text)
    allowed = not types or kind in types or (kind == "integer" and "number" in types)
    return value if allowed else as_text(text)


def as_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
