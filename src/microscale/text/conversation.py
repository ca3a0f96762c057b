"""A conversation as plain records, in no API's words: the server fills them from its own protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


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
class RenderOptions:
    """What of a prompt is not in its messages. ``None`` leaves a line of the system message out."""

    effort: Effort | None = Effort.MEDIUM
    date: str | None = None
    """Today, as ``2026-11-15``."""
    tools: tuple[Tool, ...] = ()
    response_format: ResponseFormat | None = None
    identity: str | None = "You are ChatGPT, a large language model trained by OpenAI."
    knowledge_cutoff: str | None = "2024-06"
