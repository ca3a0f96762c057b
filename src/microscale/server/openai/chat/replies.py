"""Replies of ``/v1/chat/completions``, whole and streamed. See ``encoding`` for ``UNSET`` and null."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from microscale.server.openai.logprobs import ChatLogprobs
from microscale.server.openai.usage import Usage


class CalledFunction(Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class Call(Struct, frozen=True):
    function: CalledFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    index: int | UnsetType = UNSET
    """In a stream: a call comes in pieces."""


class ChatDelta(Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """The same text under the older name."""
    tool_calls: list[Call] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    stop_reason: str | UnsetType = UNSET
    flaws: list[str] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatMessage(Struct, frozen=True):
    content: str | None
    role: Literal["assistant"] = "assistant"
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    stop_reason: str | UnsetType = UNSET
    flaws: list[str] | UnsetType = UNSET
    """What was malformed in the model's output; none of its text is lost."""


class ChatReply(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET
