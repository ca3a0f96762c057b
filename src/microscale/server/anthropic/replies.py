"""A message, its blocks and the events of its stream, as Anthropic's clients read them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class TextBlock(Struct):
    text: str
    type: str = "text"


class ThinkingBlock(Struct):
    thinking: str
    signature: str
    type: str = "thinking"


class ToolUseBlock(Struct):
    id: str
    name: str
    input: dict[str, Any]
    type: str = "tool_use"


Block = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(Struct, frozen=True):
    thinking_tokens: int


class Usage(Struct, frozen=True):
    """All of the prompt is ``input_tokens`` and ``cache_read_input_tokens`` together."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET
    cache_creation_input_tokens: int = 0
    service_tier: str = "standard"


class Ending(Struct, frozen=True):
    """How a message ended; empty while it has not."""

    stop_reason: str | None = None
    stop_sequence: str | None = None
    flaws: list[str] | UnsetType = UNSET
    """What was malformed in the model's output; none of its text is lost."""


class Message(Struct):
    id: str
    model: str
    content: list[Block]
    usage: Usage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    flaws: list[str] | UnsetType = UNSET
    type: str = "message"
    role: str = "assistant"


class Counted(Struct, frozen=True):
    input_tokens: int


# ---- events ----------------------------------------------------------------------------------------------------------


class MessageStart(Struct):
    message: Message
    type: Literal["message_start"] = "message_start"


class BlockStart(Struct):
    index: int
    content_block: Block
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
    delta: Ending
    usage: Usage
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


class ErrorReply(Struct, frozen=True):
    error: ErrorInfo
    request_id: str
    type: Literal["error"] = "error"


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping
