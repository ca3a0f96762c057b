"""A conversation as plain records, independent of any API: the server fills them from its protocol."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from microscale.errors import BadRequest

_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


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
    """An assistant's reasoning before ``content`` and the calls."""
    tool_calls: tuple[ToolCall, ...] = ()
    """An assistant's calls."""
    call_id: str | None = None
    """For a tool's result: the call that it answers."""
    name: str | None = None
    """For a tool's result: the function, if no earlier message has the call."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] | None = None
    """A JSON schema."""


@dataclass(frozen=True)
class ResponseFormat:
    """The format of the final answer, as described to the model."""

    name: str
    description: str
    schema: object
    """A JSON schema."""


@dataclass(frozen=True)
class Rendered:
    """A prompt."""

    tokens: list[int]
    begun: tuple[int, ...] = ()
    """The part of the assistant's turn that is already in the prompt; the output's parser reads it first."""


class PromptEnd(StrEnum):
    """Where a prompt ends, and the model begins."""

    TURN = "turn"
    """In the assistant's new turn."""
    OPEN = "open"
    """Inside the last message, an assistant's, which the model continues."""
    CLOSED = "closed"
    """After the last message: the model begins a turn itself."""


@dataclass(frozen=True)
class RenderOptions:
    """Everything in a prompt that is not in its messages."""

    effort: Effort | None = Effort.MEDIUM
    date: str | None = None
    """Today's date, such as ``2026-11-15``."""
    tools: tuple[Tool, ...] = ()
    response_format: ResponseFormat | None = None
    end: PromptEnd = PromptEnd.TURN
    preserve_thinking: bool | None = None
    """Whether the reasoning of all earlier turns stays in the prompt; ``None``: as the template does it. Only some
    templates have a choice."""


def open_message(conversation: Sequence[Message]) -> tuple[list[Message], Message]:
    """Split off the last message, which the model will continue."""
    last = conversation[-1] if conversation else None
    if last is None or last.role is not Role.ASSISTANT or last.tool_calls or not (last.content or last.reasoning):
        raise BadRequest(
            "Only an assistant's message with text and without calls can be continued; the last message is not one."
        )
    return list(conversation[:-1]), last


def check_function_name(name: str) -> str:
    if not _FUNCTION_NAME.fullmatch(name):
        raise BadRequest(
            f"{name[:64]!r} is not a valid function name; use 1 to 128 letters, digits, '_', '-', '.' and ':'."
        )
    return name


def answered_function(result: Message, called: Mapping[str, str]) -> str:
    """The function that a tool's result answers. ``called``: call ids of earlier messages → functions."""
    name = called.get(result.call_id or "") or result.name
    if name is None:
        call_id = (result.call_id or "")[:64]
        raise BadRequest(f"A tool result answers the call {call_id!r}, but no earlier message has that call.")
    return name
