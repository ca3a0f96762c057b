"""The format that an answer must have: a schema, a regex, a choice, a grammar.

OpenAI's and vLLM's fields express it in several ways; here they become one ``OutputFormat``. Errors name the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from llguidance.gbnf_to_lark import gbnf_to_lark

from microscale.server import error_texts
from microscale.server.host import Host
from microscale.server.options import RequestLimits
from microscale.server.requests.response_format import JsonFormat, SchemaFields, SchemaFormat, StructuredFields
from microscale.text import grammar as grammars
from microscale.text.conversation import ResponseFormat
from microscale.text.grammar import ANY_OBJECT, Form, Lark, Schema


@dataclass(frozen=True)
class OutputFormat:
    """The format that the answer must have, and the field that sets it."""

    form: Form
    where: str
    prompt_format: ResponseFormat | None = None
    """How the prompt describes it to the model."""


async def read_output_format(host: Host, fields: StructuredFields) -> OutputFormat | None:
    """``output_format_of``, off the event loop for long grammars: 64 KiB of EBNF take 0.3 s to convert (2 cores)."""
    nested = fields.structured_outputs
    grammar = fields.guided_grammar or (nested and nested.grammar) or ""
    return await host.off_loop(len(grammar), lambda: output_format_of(fields, host.limits))


def output_format_of(fields: StructuredFields, limits: RequestLimits) -> OutputFormat | None:
    """The request's output format; more than one is refused."""
    formats = [*_openai(fields, limits), *_vllm(fields, limits)]
    if len(formats) > 1:
        raise error_texts.two_formats(formats[0].where, formats[1].where)
    return formats[0] if formats else None


def _openai(fields: StructuredFields, limits: RequestLimits) -> list[OutputFormat]:
    wanted = fields.response_format
    if isinstance(wanted, JsonFormat):
        return [OutputFormat(ANY_OBJECT, "response_format")]
    if isinstance(wanted, SchemaFormat):
        return [schema_format(wanted.json_schema, "response_format.json_schema.schema", limits)]
    return []


def text_format(wanted: JsonFormat | SchemaFields | None, where: str, limits: RequestLimits) -> OutputFormat | None:
    """From ``text.format`` of ``/v1/responses``, which is flat."""
    if isinstance(wanted, JsonFormat):
        return OutputFormat(ANY_OBJECT, where)
    return None if wanted is None else schema_format(wanted, f"{where}.schema", limits)


def schema_format(wanted: SchemaFields, where: str, limits: RequestLimits) -> OutputFormat:
    check_schema(wanted.schema_, where, limits)
    described = ResponseFormat(wanted.name, wanted.description or "", wanted.schema_)
    return OutputFormat(Schema(wanted.schema_, bool(wanted.strict)), where, described)


def _vllm(fields: StructuredFields, limits: RequestLimits) -> list[OutputFormat]:
    given: list[tuple[str, str, Any]] = [
        ("json", "guided_json", fields.guided_json),
        ("regex", "guided_regex", fields.guided_regex),
        ("choice", "guided_choice", fields.guided_choice),
        ("grammar", "guided_grammar", fields.guided_grammar),
    ]
    nested = fields.structured_outputs
    if nested is not None:
        wanted = {
            "json": nested.json_,
            "regex": nested.regex,
            "choice": nested.choice,
            "grammar": nested.grammar,
            "json_object": nested.json_object or None,
        }
        given += [(kind, f"structured_outputs.{kind}", value) for kind, value in wanted.items()]
    return [OutputFormat(_form(kind, where, value, limits), where) for kind, where, value in given if value is not None]


def _form(kind: str, where: str, value: Any, limits: RequestLimits) -> Form:
    if kind == "json_object":
        return ANY_OBJECT
    if kind == "json":
        schema = _parsed(value, where) if isinstance(value, str) else value
        check_schema(schema, where, limits)
        return Schema(schema)
    size = len(value) if isinstance(value, str) else sum(map(len, value))
    if size > limits.max_schema_bytes:
        raise error_texts.too_long(where, size, "characters", limits.max_schema_bytes)
    if not size:
        raise error_texts.empty(where)
    if kind == "regex":
        return grammars.regex(value)
    return grammars.choice(value) if kind == "choice" else Lark(_lark(value, where))


def _lark(text: str, where: str) -> str:
    """A grammar in llguidance's Lark dialect, converted from EBNF (``root ::= …``) if necessary."""
    if "::=" not in text:
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the library raises the base class itself for a missing rule
        raise error_texts.invalid_ebnf(where, str(error)) from None


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise error_texts.invalid_schema(where, error) from None


def check_schema(schema: Mapping[str, Any], where: str, limits: RequestLimits) -> None:
    """Refuse a schema that is too large or too deep before anything walks through it."""
    size = len(msgspec.json.encode(schema))
    if size > limits.max_schema_bytes:
        raise error_texts.too_long(where, size, "bytes", limits.max_schema_bytes)
    level: list[object] = [schema]
    for _ in range(limits.max_schema_depth):
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
        ]
        if not level:
            return
    raise error_texts.too_deep(where, limits.max_schema_depth)
