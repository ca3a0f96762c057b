"""Builds the grammar of a whole turn or of a plain text, and has it checked before the engine sees it."""

from __future__ import annotations

from collections.abc import Sequence

from microscale.engine.sampling_params import MAX_GRAMMAR
from microscale.server import error_texts
from microscale.server.host import Host
from microscale.server.requests.chat import ChatFields, NamedTool, ToolSpec
from microscale.server.requests.response_format import StructuredFields
from microscale.server.requests.sampling import SamplingFields
from microscale.server.structured.grammar_checker import GrammarPart
from microscale.server.structured.output_format import OutputFormat, read_output_format
from microscale.text.chat_format import ChatFormat
from microscale.text.grammar import ANY_OBJECT, Schema, Turn


async def completion_grammar(host: Host, fields: StructuredFields, sampling: SamplingFields) -> str | None:
    """The grammar of a completion that consists only of the requested format."""
    output_format = await read_output_format(host, fields)
    if output_format is None:
        return None
    _refuse_conflicts(sampling)
    whole = host.chat_format.text_grammar(output_format.form)
    await host.grammars.check([GrammarPart(whole, output_format.where)])
    return whole


async def turn_grammar(
    host: Host,
    chat: ChatFields,
    output_format: OutputFormat | None,
    sampling: SamplingFields,
    begun: Sequence[int] = (),
) -> str | None:
    """The grammar of a whole turn, if any part of it is constrained. ``begun``: the part of the turn in its prompt."""
    tools = callable_tools(chat)
    must_call = chat.tool_choice not in (None, "auto", "none")
    if output_format is None and not must_call and not any(spec.function.strict for _, spec in tools):
        return None
    _refuse_conflicts(sampling)
    if chat.continue_final_message or chat.add_generation_prompt is False:
        name = "continue_final_message" if chat.continue_final_message else "add_generation_prompt"
        raise error_texts.conflicts_with_format(name)
    answer = output_format if output_format is not None and not must_call else None
    calls, parts = _calls(host.chat_format, tools)
    if answer is not None:
        parts.append(GrammarPart(host.chat_format.answer_grammar(answer.form), answer.where))
    one_call = chat.parallel_tool_calls is False
    form = None if answer is None else answer.form
    whole = host.chat_format.turn_grammar(Turn(form, calls, must_call, one_call, begun))
    where = parts[-1].where if parts else "tools"
    if len(whole) > MAX_GRAMMAR:
        raise error_texts.too_long(where, len(whole), "characters with all other formats", MAX_GRAMMAR)
    await host.grammars.check([*parts, GrammarPart(whole, where)])
    return whole


def _calls(
    chat_format: ChatFormat, tools: Sequence[tuple[int, ToolSpec]]
) -> tuple[dict[str, Schema], list[GrammarPart]]:
    """The format of each function's arguments, as far as the chat format can constrain it, and grammars to check."""
    forms = {spec.function.name: _arguments(spec) for _, spec in tools}
    for at, spec in tools:
        reason = chat_format.why_not_strict(forms[spec.function.name]) if spec.function.strict else None
        if reason is not None:
            raise error_texts.cannot_be_strict(f"tools[{at}].function.strict", reason)
    parts = [
        GrammarPart(chat_format.arguments_grammar(forms[spec.function.name]), f"tools[{at}].function.parameters")
        for at, spec in tools
    ]
    return forms, parts


def _arguments(spec: ToolSpec) -> Schema:
    """Unless a function is strict, its schema is enforced only as far as possible."""
    return Schema(spec.function.parameters or ANY_OBJECT.schema, bool(spec.function.strict))


def callable_tools(chat: ChatFields) -> Sequence[tuple[int, ToolSpec]]:
    """The tools that ``tool_choice`` allows, with their indices in the request."""
    tools = list(enumerate(chat.tools or []))
    first = {spec.function.name: at for at, spec in reversed(tools)}
    for at, spec in tools:
        if first[spec.function.name] != at:
            raise error_texts.duplicate_tool(at, first[spec.function.name])
    choice = chat.tool_choice
    if choice == "none":
        return []
    if choice in (None, "auto"):
        return tools
    if not tools:
        raise error_texts.no_tools_to_choose()
    if isinstance(choice, NamedTool):
        tools = [(at, spec) for at, spec in tools if spec.function.name == choice.function.name]
        if not tools:
            raise error_texts.tool_not_in_tools("tool_choice", choice.function.name)
    return tools


def _refuse_conflicts(sampling: SamplingFields) -> None:
    """A format decides where the output ends, so these fields cannot."""
    for name in ("ignore_eos", "min_tokens"):
        if getattr(sampling, name):
            raise error_texts.conflicts_with_format(name)
