"""Whether a value fits a small JSON schema: the keywords that the tasks use, and an error for any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from microscale.errors import Unsupported

KNOWN = {"type", "properties", "required", "additionalProperties", "items", "enum", "description", "title"}
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def fits(value: object, schema: Mapping[str, Any]) -> bool:
    """Whether ``value`` is valid against ``schema``."""
    if not schema.keys() <= KNOWN:
        raise Unsupported(f"The tasks' schemas have no {', '.join(sorted(schema.keys() - KNOWN))}.")
    kind = schema["type"]
    # JSON's true is no number, Python's is.
    if not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, list):
        return all(fits(item, schema["items"]) for item in value)
    if isinstance(value, dict):
        properties = schema["properties"]
        if not set(schema.get("required", ())) <= value.keys():
            return False
        if schema.get("additionalProperties", True) is False and not value.keys() <= properties.keys():
            return False
        return all(fits(item, properties[key]) for key, item in value.items() if key in properties)
    return True
