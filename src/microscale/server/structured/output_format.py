"""The form that an answer must have: a schema, a regex, a choice, a grammar.

OpenAI's and vLLM's fields say the same in several ways; here they become one ``OutputFormat``. Errors name the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from llguidance.gbnf_to_lark import gbnf_to_lark

from microscale.server.host import Host
from microscale.server.http.error_replies import BadField
from microscale.server.options import Limits
from microscale.server.requests.response_format import JsonFormat, SchemaFields, SchemaFormat, StructuredFields
from microscale.text import grammar as grammars
from microscale.text.conversation import ResponseFormat
from microscale.text.grammar import ANY_OBJECT, Form, Lark, Schema


@dataclass(frozen=True)
class OutputFormat:
    """The form that the answer must have, and the field that says so."""

    form: Form
    where: str
    told: ResponseFormat | None = None
    """What the model hears of it."""


async def read_output_format(host: Host, fields: StructuredFields) -> OutputFormat | None:
    """``output_format_of``, off the loop where a grammar is long: 64 KiB of EBNF take 0.3 s to convert (2 cores)."""
    nested = fields.structured_outputs
    grammar = fields.guided_grammar or (nested and nested.grammar) or ""
    return await host.off_loop(len(grammar), lambda: output_format_of(fields, host.limits))


def output_format_of(fields: StructuredFields, limits: Limits) -> OutputFormat | None:
    """What the request asks of its answer; more than one format is refused."""
    formats = [*_openai(fields, limits), *_vllm(fields, limits)]
    if len(formats) > 1:
        raise BadField(f"{formats[0].where} and {formats[1].where} each ask for a form; give one.", formats[1].where)
    return formats[0] if formats else None


def _openai(fields: StructuredFields, limits: Limits) -> list[OutputFormat]:
    wanted = fields.response_format
    if isinstance(wanted, JsonFormat):
        return [OutputFormat(ANY_OBJECT, "response_format")]
    if isinstance(wanted, SchemaFormat):
        return [schema_format(wanted.json_schema, "response_format.json_schema.schema", limits)]
    return []


def text_format(wanted: JsonFormat | SchemaFields | None, where: str, limits: Limits) -> OutputFormat | None:
    """From ``text.format`` of ``/v1/responses``, which is flat."""
    if isinstance(wanted, JsonFormat):
        return OutputFormat(ANY_OBJECT, where)
    return None if wanted is None else schema_format(wanted, f"{where}.schema", limits)


def schema_format(wanted: SchemaFields, where: str, limits: Limits) -> OutputFormat:
    check_schema(wanted.schema_, where, limits)
    told = ResponseFormat(wanted.name, wanted.description or "", wanted.schema_)
    return OutputFormat(Schema(wanted.schema_, bool(wanted.strict)), where, told)


def _vllm(fields: StructuredFields, limits: Limits) -> list[OutputFormat]:
    found: list[tuple[str, str, Any]] = [
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
        found += [(kind, f"structured_outputs.{kind}", value) for kind, value in wanted.items()]
    return [OutputFormat(_form(kind, where, value, limits), where) for kind, where, value in found if value is not None]


def _form(kind: str, where: str, value: Any, limits: Limits) -> Form:
    if kind == "json_object":
        return ANY_OBJECT
    if kind == "json":
        schema = _parsed(value, where) if isinstance(value, str) else value
        check_schema(schema, where, limits)
        return Schema(schema)
    size = len(value) if isinstance(value, str) else sum(map(len, value))
    if size > limits.max_schema_bytes:
        raise BadField(f"{where} has {size} characters; at most {limits.max_schema_bytes} are taken.", where)
    if not size:
        raise BadField(f"{where} is empty.", where)
    if kind == "regex":
        return grammars.regex(value)
    return grammars.choice(value) if kind == "choice" else Lark(_lark(value, where))


def _lark(text: str, where: str) -> str:
    """A grammar in Lark's dialect, or in EBNF as llama.cpp and vLLM's users write it (``root ::= …``)."""
    if "::=" not in text:
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the library raises the base class itself for a rule that is missing
        raise BadField(f"{where} is no EBNF grammar: {str(error)[:200]}.", where) from None


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise BadField(f"{where} is no JSON schema: {error}.", where) from None


def check_schema(schema: Mapping[str, Any], where: str, limits: Limits) -> None:
    """Refuse one that is too large or too deep, before anything walks through it."""
    size = len(msgspec.json.encode(schema))
    if size > limits.max_schema_bytes:
        raise BadField(f"{where} has {size} bytes; at most {limits.max_schema_bytes} are taken.", where)
    level: list[object] = [schema]
    for _ in range(limits.max_schema_depth):
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
        ]
        if not level:
            return
    raise BadField(f"{where} is nested deeper than {limits.max_schema_depth} levels.", where)
