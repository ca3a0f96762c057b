"""A conversation as plain records, in no API's words: the server fills them from its own protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from microscale.errors import BadRequest


class Role(StrEnum):
    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Effort(StrEnum):
    """How long the model may think."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


@dataclass(frozen=True)
class ToolCall:
    """A call that the assistant made in an earlier turn."""

    call_id: str
    name: str
    arguments: str
    """The JSON text, as the model wrote it."""


@dataclass(frozen=True)
class Message:
    role: Role
    content: str = ""
    reasoning: str = ""
    """Of an assistant: what it thought before ``content`` and the calls."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant."""
    call_id: str | None = None
    """Of a tool's result: the call that it answers."""
    name: str | None = None
    """Of a tool's result: the function, where no earlier message has the call."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] | None = None
    """A JSON schema."""


@dataclass(frozen=True)
class ResponseFormat:
    """The form of the final answer, as the model hears of it."""

    name: str
    description: str
    schema: object
    """A JSON schema."""


@dataclass(frozen=True)
class Rendered:
    """A prompt."""

    tokens: list[int]
    begun: tuple[int, ...] = ()
    """What an output's parser reads before the output: of a turn that the prompt has begun."""


class PromptEnd(StrEnum):
    """Where a prompt ends, and so where the model begins."""

    TURN = "turn"
    """In the assistant's new turn."""
    OPEN = "open"
    """In the last message, an assistant's, which the model continues."""
    CLOSED = "closed"
    """After the last message: the model itself begins a turn."""


@dataclass(frozen=True)
class RenderOptions:
    """What of a prompt is not in its messages."""

    effort: Effort | None = Effort.MEDIUM
    date: str | None = None
    """Today, as ``2026-11-15``."""
    tools: tuple[Tool, ...] = ()
    response_format: ResponseFormat | None = None
    end: PromptEnd = PromptEnd.TURN


def open_message(conversation: Sequence[Message]) -> tuple[list[Message], Message]:
    """The conversation before its last message, and that message, which the model is to continue."""
    last = conversation[-1] if conversation else None
    if last is None or last.role is not Role.ASSISTANT or last.tool_calls or not (last.content or last.reasoning):
        raise BadRequest("To be continued, the last message must be the assistant's, with text and without calls.")
    return list(conversation[:-1]), last
