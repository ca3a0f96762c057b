"""JSON schemas of functions' parameters and of answers, and their values as JSON text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Parameter:
    """One property of a schema."""

    name: str
    kind: str
    """A JSON type, or ``enum``."""
    base: str
    """What it is about: decides its values."""
    description: str
    required: bool
    enum: tuple[str, ...]

    def schema(self) -> dict[str, Any]:
        kind = "string" if self.kind == "enum" else self.kind
        made: dict[str, Any] = {"type": kind}
        if kind == "array":
            made["items"] = {"type": "string"}
        if self.description:
            made["description"] = self.description
        if self.enum:
            made["enum"] = list(self.enum)
        return made


def parameter_schema(parameters: Sequence[Parameter]) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {parameter.name: parameter.schema() for parameter in parameters},
    }
    required = [parameter.name for parameter in parameters if parameter.required]
    return {**schema, "required": required} if required else schema


def arguments_json(arguments: dict[str, Any]) -> str:
    """As gpt-oss writes arguments: a space after neither comma nor colon."""
    return json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
