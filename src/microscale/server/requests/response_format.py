"""The fields that set the output format: OpenAI's ``response_format``, and the fields of vLLM's clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from microscale.server.requests.base import Body, Only
from microscale.server.requests.fields import Strings

FORMATS = ("text", "json_object", "json_schema")


def _known_format(value: object) -> object:
    if value not in FORMATS:
        raise PydanticCustomError("literal_error", "must be one of {most}", {"most": ", ".join(FORMATS)})
    return value


class TextFormat(Body):
    # A format of an unknown type is parsed as this one, so the error lists all types.
    type: Annotated[Literal["text"], BeforeValidator(_known_format)]


class JsonFormat(Body):
    type: Literal["json_object"]


class SchemaFields(Body):
    """A schema, and how it is described to the model."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: Annotated[str, Field(max_length=4096)] | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: SchemaFields


def format_kind(value: object) -> str:
    """The variant, by type; variant names do not appear in the paths of errors."""
    kind = value.get("type") if isinstance(value, dict) else None
    return {"json_object": "Json", "json_schema": "Schema"}.get(kind if isinstance(kind, str) else "", "Text")


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("Text")] | Annotated[JsonFormat, Tag("Json")] | Annotated[SchemaFormat, Tag("Schema")],
    Discriminator(format_kind),
]


class StructuredOutputs(Body):
    """vLLM's ``structured_outputs``."""

    ONLY: ClassVar[Mapping[str, Only]] = {"structural_tag": Only((), "use tools, or one of json, regex and grammar")}

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = None


class StructuredFields(Body):
    """Output formats: OpenAI's field, and the fields of vLLM's clients."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None
