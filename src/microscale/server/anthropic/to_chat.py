"""Converts a Messages request to chat fields, so that all APIs share one path."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from microscale.server import error_texts
from microscale.server.anthropic.input_blocks import (
    AnthropicMessage,
    Block,
    BlocksSource,
    DocumentBlock,
    RedactedBlock,
    ResultBlock,
    SearchResultBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from microscale.server.anthropic.request import BILLING, ClientTool, CountRequest, HostedTool
from microscale.server.anthropic.thinking import carried, effort_of
from microscale.server.error_texts import BadField
from microscale.server.options import RequestLimits
from microscale.server.requests.base import MANY
from microscale.server.requests.chat import (
    AssistantMessage,
    ChatFields,
    ChatMessage,
    Function,
    FunctionName,
    MessageBuilder,
    NamedTool,
    TextMessage,
    ToolMessage,
    ToolSpec,
)
from microscale.server.requests.response_format import SchemaFields
from microscale.server.structured.output_format import OutputFormat, schema_format

INVALID = "INVALID_JSON"
"""The key for tool input that is not a JSON object, from Anthropic's guide to streaming."""


# ---- messages --------------------------------------------------------------------------------------------------------


def chat_fields(request: CountRequest, limits: RequestLimits) -> ChatFields:
    messages = [*_instructions(request), *_conversation(request.messages)]
    most = min(limits.max_messages, MANY)
    if not messages:
        raise error_texts.not_readable("messages")
    if len(messages) > most:
        raise error_texts.too_many("messages", len(messages), most, "messages")
    choice = request.tool_choice
    return ChatFields(
        messages=messages,
        tools=tool_specs(request) or None,
        tool_choice=tool_choice_of(request),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        reasoning_effort=effort_of(request),
        # Anthropic calls it a prefill.
        continue_final_message=isinstance(messages[-1], AssistantMessage),
    )


def _instructions(request: CountRequest) -> Iterator[ChatMessage]:
    system = request.system
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    text = "\n\n".join(text for text in texts if text and not text.startswith(f"{BILLING}:"))
    if text:
        yield TextMessage(role="system", content=text)


def _conversation(messages: Sequence[AnthropicMessage]) -> list[ChatMessage]:
    builder = MessageBuilder()
    for at, message in enumerate(messages):
        content = message.content
        blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
        if message.role == "assistant":
            _add_assistant(builder, blocks, f"messages[{at}].content")
        else:
            _add_other(builder, message.role, blocks, f"messages[{at}].content")
    return builder.messages()


def _add_assistant(builder: MessageBuilder, blocks: Sequence[Block], where: str) -> None:
    texts: list[str] = []
    for at, block in enumerate([*blocks, None]):
        if isinstance(block, TextBlock):
            texts += [block.text] if block.text else []
            continue
        if texts:
            builder.say("\n".join(texts))
            texts = []
        if isinstance(block, ThinkingBlock):
            if reasoning := block.thinking or carried(block.signature):
                builder.think(reasoning)
        elif isinstance(block, ToolUseBlock):
            builder.call(block.id, block.name, arguments_of(block.input))
        elif block is not None and not isinstance(block, RedactedBlock):
            raise error_texts.wrong_block(f"{where}[{at}]", "assistant", block.type)


def _add_other(builder: MessageBuilder, role: Literal["user", "system"], blocks: Sequence[Block], where: str) -> None:
    texts: list[str] = []
    for at, block in enumerate([*blocks, None]):
        if isinstance(block, TextBlock | DocumentBlock | SearchResultBlock):
            texts.append(_readable(block))
            continue
        if texts:
            builder.add(TextMessage(role=role, content="\n".join(texts)))
            texts = []
        if isinstance(block, ToolResultBlock):
            builder.add(ToolMessage(role="tool", content=_result(block), tool_call_id=block.tool_use_id))
        elif block is not None:
            raise error_texts.wrong_block(f"{where}[{at}]", role, block.type)


def _result(block: ToolResultBlock) -> str:
    content = block.content or ""
    text = content if isinstance(content, str) else "\n".join(_readable(part) for part in content)
    # Chat formats cannot mark a result as an error.
    return f"Error: {text}" if block.is_error else text


def _readable(block: ResultBlock) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, SearchResultBlock):
        return "\n".join([block.title, block.source, *(part.text for part in block.content)])
    if isinstance(block, ToolReferenceBlock):
        return block.tool_name
    assert isinstance(block, DocumentBlock), "all others are refused when they are parsed"
    source = block.source
    if isinstance(source, TextSource):
        text = source.data
    else:
        assert isinstance(source, BlocksSource)
        text = source.content if isinstance(source.content, str) else "\n".join(part.text for part in source.content)
    return "\n".join(filter(None, (block.title, block.context, text)))


# ---- other fields ----------------------------------------------------------------------------------------------------


def output_format_of(request: CountRequest, limits: RequestLimits) -> OutputFormat | None:
    """The output format, under its current or its older name."""
    config = request.output_config
    new = None if config is None else config.format
    if new is not None and request.output_format is not None:
        raise error_texts.two_formats("output_config.format", "output_format")
    wanted, where = (new, "output_config.format") if new is not None else (request.output_format, "output_format")
    if wanted is None:
        return None
    # Strict: Anthropic guarantees the schema, so one that cannot be enforced is refused.
    fields = SchemaFields(name="answer", schema=wanted.schema_, strict=True)
    return schema_format(fields, f"{where}.schema", limits)


# ---- tools -----------------------------------------------------------------------------------------------------------


def arguments_of(value: dict[str, Any]) -> str:
    """A call's input as the model wrote it, or would have."""
    if len(value) == 1 and isinstance(text := value.get(INVALID), str):
        return text
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def custom_tools(request: CountRequest) -> list[tuple[int, ClientTool]]:
    return [(at, tool) for at, tool in enumerate(request.tools or ()) if isinstance(tool, ClientTool)]


def tool_specs(request: CountRequest) -> list[ToolSpec]:
    return [
        ToolSpec(
            type="function",
            function=Function(
                name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
            ),
        )
        for _, tool in custom_tools(request)
    ]


def tool_choice_of(request: CountRequest) -> Literal["none", "auto", "required"] | NamedTool | None:
    choice = request.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    name = choice.name or ""
    for tool in request.tools or ():
        if isinstance(tool, HostedTool) and name in (tool.name, tool.type):
            raise error_texts.hosted_tool_chosen(name)
    return NamedTool(type="function", function=FunctionName(name=name))


# ---- errors ----------------------------------------------------------------------------------------------------------

RENAMED = (
    (".function.parameters", ".input_schema"),
    (".function.strict", ".strict"),
    ("continue_final_message", "messages: a final assistant message"),
)


def renamed(error: BadField, request: CountRequest) -> BadField:
    """The error with the names and indices that fields have in this API."""
    places = [at for at, _ in custom_tools(request)]

    def place(match: re.Match[str]) -> str:
        at = int(match[1])
        return f"tools[{places[at]}]" if at < len(places) else match[0]

    def here(text: str) -> str:
        for chat, own in RENAMED:
            text = text.replace(chat, own)
        text = re.sub(r"^stop\b", "stop_sequences", text)
        return re.sub(r"\btools\[(\d{1,5})\]", place, text)

    param = None if error.param is None else here(error.param).partition(":")[0]
    return BadField(here(str(error)), param, error.code)
