"""What is sent back, as msgspec structs: encoded in about a microsecond, where a chunk goes out for every token.

``UNSET`` leaves a field out; ``None`` is sent as null, where OpenAI's clients expect one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

encode = msgspec.json.Encoder().encode


class TextSlot:
    """JSON that was encoded but for one text, wherever it stands."""

    def __init__(self, encoded: Callable[[str], bytes]) -> None:
        """``encoded``: the JSON with a text, which is asked for once, with one that stands nowhere else."""
        mark = secrets.token_hex(16)
        self._around = encoded(mark).split(encode(mark))

    def filled(self, text: str) -> bytes:
        return encode(text).join(self._around)


class CachedTokens(Struct, frozen=True):
    cached_tokens: int


class ReasoningTokens(Struct, frozen=True):
    reasoning_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


# ---- chat ------------------------------------------------------------------------------------------------------------


class CalledFunction(Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class Call(Struct, frozen=True):
    function: CalledFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    index: int | UnsetType = UNSET
    """In a stream: a call comes in pieces."""


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenLogprob]
    """Of the tokens of ``content``, and of no others."""
    refusal: None = None
    reasoning: list[TokenLogprob] | UnsetType = UNSET
    """Of the tokens of ``reasoning``."""


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


# ---- completions -----------------------------------------------------------------------------------------------------


class TextLogprobs(Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """Null for the first token of a prompt: nothing stands before it."""
    text_offset: list[int]


class PromptLogprob(Struct, frozen=True):
    """vLLM's, of one token at one place of a prompt."""

    logprob: float
    rank: int | None
    """From 1; null for a token of the prompt that is not among the most likely that were asked for."""
    decoded_token: str


class TextChoice(Struct, frozen=True):
    """The same in a stream and at once."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: TextLogprobs | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    stop_reason: str | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class TextReply(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


# ---- the rest --------------------------------------------------------------------------------------------------------


class Model(Struct, frozen=True):
    """What OpenAI's clients read of a model, and what Anthropic's do."""

    id: str
    created: int
    max_model_len: int
    display_name: str
    created_at: str
    """``created`` as Anthropic has it: RFC 3339."""
    max_input_tokens: int
    max_tokens: int
    object: str = "model"
    owned_by: str = "microscale"
    type: str = "model"
    lifecycle: str = "active"


class ModelList(Struct, frozen=True):
    data: list[Model]
    first_id: str
    last_id: str
    object: str = "list"
    has_more: bool = False


class Tokenized(Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(Struct, frozen=True):
    prompt: str


class PlanReply(Struct, frozen=True):
    model: str
    vocab_size: int
    max_model_len: int
    plan: str
    """Which kernel runs what, as a table."""
    gpu: str | UnsetType = UNSET
    precision: str | UnsetType = UNSET
    decisions: msgspec.Raw | UnsetType = UNSET
    """By op, layer kind and batch size: the kernel, and why each other one does not run."""
    memory: msgspec.Raw | UnsetType = UNSET
    """Bytes by what they hold."""


class VersionReply(Struct, frozen=True):
    version: str


class Load(Struct, frozen=True):
    server_load: int
    """Requests that are being answered, under vLLM's name."""


class Health(Struct, frozen=True):
    status: str
    reason: str | UnsetType = UNSET
