"""Forms that an answer or a call must have: from the request's fields to one grammar that was tried.

Fields of OpenAI's and vLLM's names say the same in several ways; here they become one ``Form``, and with the tools that
may or must be called the grammar of the whole turn. What is wrong is told with the field that holds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from llguidance.gbnf_to_lark import gbnf_to_lark

from microscale.engine.process.messages import MAX_GRAMMAR
from microscale.server.faults import BadField
from microscale.server.host import Host
from microscale.server.limits import Limits
from microscale.server.protocol import (
    ChatFields,
    JsonFormat,
    NamedTool,
    SamplingFields,
    SchemaFields,
    SchemaFormat,
    StructuredFields,
    ToolSpec,
)
from microscale.server.structured_check import Part
from microscale.text import grammar as grammars
from microscale.text.chat_format import ChatFormat
from microscale.text.conversation import ResponseFormat
from microscale.text.grammar import ANY_OBJECT, Form, Lark, Schema, Turn


@dataclass(frozen=True)
class Wish:
    """The form that the answer shall have, and the field that says so."""

    form: Form
    where: str
    told: ResponseFormat | None = None
    """What the model hears of it."""


async def read_wish(host: Host, fields: StructuredFields) -> Wish | None:
    """``wish_of``, off the loop where a grammar is long: 64 KiB of EBNF take 0.3 s to convert (2 cores)."""
    nested = fields.structured_outputs
    grammar = fields.guided_grammar or (nested and nested.grammar) or ""
    return await host.off_loop(len(grammar), lambda: wish_of(fields, host.limits))


def wish_of(fields: StructuredFields, limits: Limits) -> Wish | None:
    """What the request asks of its answer; more than one wish is refused."""
    wishes = [*_openai(fields, limits), *_vllm(fields, limits)]
    if len(wishes) > 1:
        raise BadField(f"{wishes[0].where} and {wishes[1].where} each ask for a form; give one.", wishes[1].where)
    return wishes[0] if wishes else None


def _openai(fields: StructuredFields, limits: Limits) -> list[Wish]:
    wanted = fields.response_format
    if isinstance(wanted, JsonFormat):
        return [Wish(ANY_OBJECT, "response_format")]
    if isinstance(wanted, SchemaFormat):
        return [schema_wish(wanted.json_schema, "response_format.json_schema.schema", limits)]
    return []


def text_wish(wanted: JsonFormat | SchemaFields | None, where: str, limits: Limits) -> Wish | None:
    """Of ``/v1/responses``, whose formats are flat."""
    if isinstance(wanted, JsonFormat):
        return Wish(ANY_OBJECT, where)
    return None if wanted is None else schema_wish(wanted, f"{where}.schema", limits)


def schema_wish(wanted: SchemaFields, where: str, limits: Limits) -> Wish:
    check_schema(wanted.schema_, where, limits)
    told = ResponseFormat(wanted.name, wanted.description or "", wanted.schema_)
    return Wish(Schema(wanted.schema_, bool(wanted.strict)), where, told)


def _vllm(fields: StructuredFields, limits: Limits) -> list[Wish]:
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
    return [Wish(_form(kind, where, value, limits), where) for kind, where, value in found if value is not None]


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


# ---- grammars --------------------------------------------------------------------------------------------------------


async def completion_grammar(host: Host, fields: StructuredFields, sampling: SamplingFields) -> str | None:
    """Of a text that is nothing but the wanted form."""
    wish = await read_wish(host, fields)
    if wish is None:
        return None
    _refuse_conflicts(sampling)
    whole = host.chat_format.text_grammar(wish.form)
    await host.grammars.check([Part(whole, wish.where)])
    return whole


async def turn_grammar(host: Host, chat: ChatFields, wish: Wish | None, sampling: SamplingFields) -> str | None:
    """Of a whole turn, if anything in it must have a form."""
    tools = callable_tools(chat)
    must_call = chat.tool_choice not in (None, "auto", "none")
    if wish is None and not must_call and not any(spec.function.strict for _, spec in tools):
        return None
    _refuse_conflicts(sampling)
    if chat.continue_final_message or chat.add_generation_prompt is False:
        name = "continue_final_message" if chat.continue_final_message else "add_generation_prompt"
        raise BadField(f"{name} cannot be kept where the answer or a call must have a form.", name)
    answer = wish if wish is not None and not must_call else None
    calls, parts = _calls(host.chat_format, tools)
    if answer is not None:
        parts.append(Part(host.chat_format.answer_grammar(answer.form), answer.where))
    one_call = chat.parallel_tool_calls is False
    whole = host.chat_format.turn_grammar(Turn(None if answer is None else answer.form, calls, must_call, one_call))
    where = parts[-1].where if parts else "tools"
    if len(whole) > MAX_GRAMMAR:
        raise BadField(f"All forms together have {len(whole)} characters; at most {MAX_GRAMMAR} are taken.", where)
    await host.grammars.check([*parts, Part(whole, where)])
    return whole


def _calls(chat_format: ChatFormat, tools: Sequence[tuple[int, ToolSpec]]) -> tuple[dict[str, Schema], list[Part]]:
    """The form of each function's arguments, as far as the chat format can bind them, and each as a part to try."""
    if chat_format.FREE_ARGUMENTS is not None:
        for at, spec in tools:
            if spec.function.strict:
                where = f"tools[{at}].function.strict"
                raise BadField(f"{where} cannot be kept: {chat_format.FREE_ARGUMENTS}.", where)
        return {spec.function.name: ANY_OBJECT for _, spec in tools}, []
    forms = {spec.function.name: _arguments(spec) for _, spec in tools}
    parts = [
        Part(chat_format.arguments_grammar(forms[spec.function.name]), f"tools[{at}].function.parameters")
        for at, spec in tools
    ]
    return forms, parts


def _arguments(spec: ToolSpec) -> Schema:
    """Those of a function that is not strict follow its schema as far as that can be kept."""
    return Schema(spec.function.parameters or ANY_OBJECT.schema, bool(spec.function.strict))


def callable_tools(chat: ChatFields) -> Sequence[tuple[int, ToolSpec]]:
    """The tools that ``tool_choice`` leaves, with their places."""
    tools = list(enumerate(chat.tools or []))
    first = {spec.function.name: at for at, spec in reversed(tools)}
    for at, spec in tools:
        if first[spec.function.name] != at:
            raise BadField(f"tools[{at}] has the name of tools[{first[spec.function.name]}].", "tools")
    choice = chat.tool_choice
    if choice == "none":
        return []
    if choice in (None, "auto"):
        return tools
    if not tools:
        raise BadField("tool_choice wants a call, and there are no tools.", "tool_choice")
    if isinstance(choice, NamedTool):
        tools = [(at, spec) for at, spec in tools if spec.function.name == choice.function.name]
        if not tools:
            raise BadField(f"tool_choice names {choice.function.name[:64]!r}, which is not in tools.", "tool_choice")
    return tools


def _refuse_conflicts(sampling: SamplingFields) -> None:
    """A form has an end, and the output ends there."""
    for name in ("ignore_eos", "min_tokens"):
        if getattr(sampling, name):
            raise BadField(f"{name} cannot be kept where the output must have a form: that decides its end.", name)
