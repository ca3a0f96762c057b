"""Builds a prompt: the messages and tools of a request become the records that ``text`` renders."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from microscale.server import error_texts
from microscale.server.host import Host
from microscale.server.options import RequestLimits
from microscale.server.requests.chat import AssistantMessage, ChatFields, ChatMessage, Content, ToolMessage
from microscale.server.structured.output_format import check_schema
from microscale.text.conversation import (
    Effort,
    Message,
    PromptEnd,
    RenderOptions,
    ResponseFormat,
    Role,
    Tool,
    ToolCall,
)
from microscale.text.output import ChatOutput


@dataclass(frozen=True)
class ChatPrompt:
    """Token ids, and how to parse the output that follows them."""

    tokens: list[int]
    tools: tuple[Tool, ...]
    """The functions that may be called."""
    stops: frozenset[int]
    """Tokens at which the output ends."""
    begun: tuple[int, ...] = ()
    """Tokens that the output's parser reads first; see ``Rendered``."""
    one_call: bool = False
    """The output ends with its first call."""


EFFORTS = {
    "none": Effort.LOW,
    "minimal": Effort.LOW,
    "low": Effort.LOW,
    "medium": Effort.MEDIUM,
    "high": Effort.HIGH,
    "xhigh": Effort.HIGH,
}
"""OpenAI's levels → the three that the models have."""
VERBOSITY = {"low": "Keep the final answer short.", "high": "Make the final answer detailed."}
"""The models have no such setting, so the prompt says it in words. They answer at medium by default."""


def render(host: Host, chat: ChatFields, response: ResponseFormat | None = None) -> ChatPrompt:
    """Takes time in proportion to the text: run it off the event loop."""
    tools = offered(chat, host.limits)
    options = RenderOptions(
        effort=effort_of(chat),
        date=datetime.date.today().isoformat(),
        tools=tools,
        response_format=response,
        end=_end(chat),
        preserve_thinking=None if chat.chat_template_kwargs is None else chat.chat_template_kwargs.preserve_thinking,
    )
    if len(chat.messages) > host.limits.max_messages:
        raise error_texts.too_many("messages", len(chat.messages), host.limits.max_messages, "messages")
    prompt = host.chat_format.rendered(_conversation(chat), options)
    one_call = bool(tools) and chat.parallel_tool_calls is False
    stops = host.chat_format.stops | ({host.chat_format.call_end} if one_call else set())
    return ChatPrompt(prompt.tokens, tools, stops, prompt.begun, one_call)


def output_of(host: Host, prompt: ChatPrompt, stops: Sequence[str] = (), *, keep_stop: bool = False) -> ChatOutput:
    """The parser for the model's tokens after a prompt. ``stops``: stop strings."""
    parser = host.chat_format.parser(prompt.tools)
    return ChatOutput(parser, stops=stops, keep_stop=keep_stop, begun=prompt.begun, one_call=prompt.one_call)


def effort_of(chat: ChatFields) -> Effort:
    options = chat.chat_template_kwargs
    wanted = chat.reasoning_effort or (None if options is None else options.reasoning_effort)
    if wanted is not None:
        return EFFORTS[wanted]
    return Effort.LOW if options is not None and options.enable_thinking is False else Effort.MEDIUM


def _end(chat: ChatFields) -> PromptEnd:
    if chat.continue_final_message:
        return PromptEnd.OPEN
    return PromptEnd.CLOSED if chat.add_generation_prompt is False else PromptEnd.TURN


def _conversation(chat: ChatFields) -> list[Message]:
    messages = [_message(message) for message in chat.messages]
    instruction = VERBOSITY.get(chat.verbosity or "")
    if instruction is None:
        return messages
    instructions = (Role.SYSTEM, Role.DEVELOPER)
    leading = next((at for at, message in enumerate(messages) if message.role not in instructions), len(messages))
    return [*messages[:leading], Message(Role.DEVELOPER, instruction), *messages[leading:]]


def offered(chat: ChatFields, limits: RequestLimits) -> tuple[Tool, ...]:
    """The tools in the prompt. With ``tool_choice: none`` there are none, so the model cannot call one."""
    specs = chat.tools or []
    if len(specs) > limits.max_tools:
        raise error_texts.too_many("tools", len(specs), limits.max_tools, "tools")
    for number, spec in enumerate(specs):
        if spec.function.parameters is not None:
            check_schema(spec.function.parameters, f"tools[{number}].function.parameters", limits)
    tools = tuple(Tool(spec.function.name, spec.function.description or "", spec.function.parameters) for spec in specs)
    return () if chat.tool_choice == "none" else tools


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
