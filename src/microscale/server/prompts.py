"""The chat protocol's messages and tools as the records that ``text`` renders."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import msgspec

from microscale.server.faults import BadField
from microscale.server.host import Host
from microscale.server.limits import Limits
from microscale.server.protocol import (
    AssistantMessage,
    ChatFields,
    ChatMessage,
    Content,
    NamedTool,
    ToolMessage,
    ToolSpec,
)
from microscale.text.conversation import Effort, Message, RenderOptions, Role, Tool, ToolCall


@dataclass(frozen=True)
class ChatPrompt:
    """Token ids, and what of the answer they already contain."""

    tokens: list[int]
    begun: list[int]
    """The end of ``tokens``: the header of a message that the model is made to write."""
    tools: frozenset[str]
    """Functions that may be called."""


def render(host: Host, chat: ChatFields) -> ChatPrompt:
    """Takes time with the length of the text: run it off the loop."""
    tools = offered(chat, host.limits)
    options = RenderOptions(
        effort=Effort(chat.reasoning_effort or Effort.MEDIUM),
        date=datetime.date.today().isoformat(),
        tools=tools,
    )
    if len(chat.messages) > host.limits.max_messages:
        raise BadField(
            f"There are {len(chat.messages)} messages; at most {host.limits.max_messages} are taken.", "messages"
        )
    tokens = host.renderer.render([_message(message) for message in chat.messages], options)
    begun = _forced(host, chat, tools)
    return ChatPrompt(tokens + begun, begun, frozenset(tool.name for tool in tools))


def offered(chat: ChatFields, limits: Limits) -> tuple[Tool, ...]:
    """The tools that the model hears of. With ``tool_choice: none`` it hears of none, so it cannot call one."""
    specs = chat.tools or []
    if len(specs) > limits.max_tools:
        raise BadField(f"There are {len(specs)} tools; at most {limits.max_tools} are taken.", "tools")
    for number, spec in enumerate(specs):
        _check_schema(spec, f"tools[{number}].function.parameters", limits)
    tools = tuple(Tool(spec.function.name, spec.function.description or "", spec.function.parameters) for spec in specs)
    return () if chat.tool_choice == "none" else tools


def _forced(host: Host, chat: ChatFields, tools: tuple[Tool, ...]) -> list[int]:
    """The beginning of the call that ``tool_choice`` wants."""
    choice = chat.tool_choice
    if choice in (None, "none", "auto"):
        return []
    names = [tool.name for tool in tools]
    if not names:
        raise BadField("tool_choice wants a call, and there are no tools.", "tool_choice")
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise BadField(f"tool_choice names {choice.function.name[:64]!r}, which is not in tools.", "tool_choice")
        return host.renderer.header("commentary", choice.function.name)
    if len(names) == 1:
        return host.renderer.header("commentary", names[0])
    # The name is the model's to choose. Without the full stop, which is one token with what follows it.
    tokens = host.renderer.tokens
    return [tokens.channel, *host.tokenizer.encode("commentary to=functions")]


def _check_schema(spec: ToolSpec, where: str, limits: Limits) -> None:
    schema = spec.function.parameters
    if schema is None:
        return
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


def _message(message: ChatMessage) -> Message:
    text = _text(message.content)
    if isinstance(message, AssistantMessage):
        calls = tuple(ToolCall(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ())
        return Message(Role.ASSISTANT, text, message.reasoning or message.reasoning_content or "", calls)
    if isinstance(message, ToolMessage):
        return Message(Role.TOOL, text, call_id=message.tool_call_id, name=message.name)
    return Message(Role(message.role), text)


def _text(content: Content) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)
