"""Requests and replies of ``/v1/chat/completions``. See ``http.encoding`` for ``UNSET`` and null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType
from pydantic import BeforeValidator, Field

from microscale.server.openai.logprobs import ChatLogprobs
from microscale.server.openai.usage import Usage
from microscale.server.requests.base import Only
from microscale.server.requests.chat import ChatFields
from microscale.server.requests.fields import CHAT_MARKS, ONLY, unset_if_minus_one
from microscale.server.requests.response_format import StructuredFields
from microscale.server.requests.sampling import SamplingFields


class ChatRequest(SamplingFields, StructuredFields, ChatFields):
    """``/v1/chat/completions``."""

    HARMLESS = CHAT_MARKS
    ONLY: ClassVar[Mapping[str, Only]] = {**ONLY, "prompt_logprobs": Only((), "use /v1/completions")}

    max_completion_tokens: Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(unset_if_minus_one)] = None
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CalledFunction(Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ChatToolCall(Struct, frozen=True):
    function: CalledFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    index: int | UnsetType = UNSET
    """In a stream, where a call arrives in pieces."""


class ChatMessage(Struct, frozen=True):
    """A whole message, or what a chunk adds to one."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """The same text under an older name."""
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: ChatMessage | UnsetType = UNSET
    """In a stream."""
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    stop_reason: str | UnsetType = UNSET
    flaws: list[str] | UnsetType = UNSET
    """What was malformed in the model's output; no text is lost."""


class ChatReply(Struct, frozen=True):
    """A whole reply, or a chunk of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | UnsetType | None
    object: str
    prompt_token_ids: list[int] | UnsetType = UNSET
