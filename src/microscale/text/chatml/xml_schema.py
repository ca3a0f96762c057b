"""What a JSON schema says about the text of one parameter: texts are written as they are, all other values as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from microscale.text.json_text import is_json

MAX_REFERENCES = 16
TEXT = "string"
NO_TYPES: frozenset[str] = frozenset()

_NUMBER = re.compile(r"-?[0-9]+([.eE].*)?")
_FIRST = {"{": "object", "[": "array", '"': TEXT, "t": "boolean", "f": "boolean", "n": "null"}
# Templates of Qwen 3.5 wrote these words in calls of earlier turns, and models learn from them.
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema as an object without a reference at its top: empty if it allows everything or refers to nothing."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            break
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root
        for key in reference.removeprefix("#").split("/")[1:]:
            schema = schema.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return {}


def alternatives(schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[Mapping[str, Any]]:
    """A union's members, without references and unions; at least one."""
    schema = resolved(schema, root)
    members = schema.get("anyOf", schema.get("oneOf"))
    if members is None and _is_single(schema.get("allOf")):
        members = schema["allOf"]
    if isinstance(members, Sequence) and members and depth < MAX_REFERENCES:
        return [found for member in members for found in alternatives(member, root, depth + 1)]
    kinds = schema.get("type")
    if isinstance(kinds, list) and "enum" not in schema and "const" not in schema:
        return [{**schema, "type": kind} for kind in kinds] or [{}]
    return [schema]


def _is_single(members: Any) -> bool:
    return isinstance(members, Sequence) and len(members) == 1


def listed(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """The values that a schema lists, if it does."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


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
