"""Replies of ``/v1/messages``: a message, its blocks, and the events of its stream."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class TextReplyBlock(Struct):
    text: str
    type: str = "text"


class ThinkingReplyBlock(Struct):
    thinking: str
    signature: str
    type: str = "thinking"


class ToolUseReplyBlock(Struct):
    id: str
    name: str
    input: dict[str, Any]
    type: str = "tool_use"


ReplyBlock = TextReplyBlock | ThinkingReplyBlock | ToolUseReplyBlock


class ThinkingTokens(Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(Struct, frozen=True):
    """The prompt has ``input_tokens`` plus ``cache_read_input_tokens`` tokens."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET
    cache_creation_input_tokens: int = 0
    service_tier: str = "standard"


class MessageEnding(Struct, frozen=True):
    """How a message ended; empty until it has."""

    stop_reason: str | None = None
    stop_sequence: str | None = None
    flaws: list[str] | UnsetType = UNSET
    """What was malformed in the model's output; no text is lost."""


class MessageReply(Struct):
    id: str
    model: str
    content: list[ReplyBlock]
    usage: MessageUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    flaws: list[str] | UnsetType = UNSET
    type: str = "message"
    role: str = "assistant"


class TokenCount(Struct, frozen=True):
    input_tokens: int


# ---- events ----------------------------------------------------------------------------------------------------------


class MessageStart(Struct):
    message: MessageReply
    type: Literal["message_start"] = "message_start"


class BlockStart(Struct):
    index: int
    content_block: ReplyBlock
    type: Literal["content_block_start"] = "content_block_start"


class TextDelta(Struct):
    text: str
    type: str = "text_delta"


class ThinkingDelta(Struct):
    thinking: str
    type: str = "thinking_delta"


class SignatureDelta(Struct):
    signature: str
    type: str = "signature_delta"


class InputDelta(Struct):
    partial_json: str
    type: str = "input_json_delta"


class BlockDelta(Struct):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta
    type: Literal["content_block_delta"] = "content_block_delta"


class BlockStop(Struct):
    index: int
    type: Literal["content_block_stop"] = "content_block_stop"


class MessageDelta(Struct):
    delta: MessageEnding
    usage: MessageUsage
    type: Literal["message_delta"] = "message_delta"


class MessageStop(Struct):
    type: Literal["message_stop"] = "message_stop"


class Ping(Struct):
    type: Literal["ping"] = "ping"


class ErrorDetails(Struct, frozen=True):
    error_code: str


class ErrorInfo(Struct, frozen=True):
    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET


class AnthropicErrorReply(Struct, frozen=True):
    error: ErrorInfo
    request_id: str
    type: Literal["error"] = "error"


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping
