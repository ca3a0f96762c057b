"""Replies of ``/v1/responses``: a response, its items, and the events of its stream."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct):
    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    type: str = "output_text"


class ReasoningReplyText(Struct):
    text: str
    type: str = "reasoning_text"


class MessageItem(Struct):
    id: str
    status: Status
    content: list[OutputText]
    role: str = "assistant"
    type: str = "message"


class ReasoningReplyItem(Struct):
    id: str
    status: Status
    content: list[ReasoningReplyText]
    summary: list[Any] = field(default_factory=list)
    encrypted_content: str | UnsetType = UNSET
    type: str = "reasoning"


class CallReplyItem(Struct):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET
    type: str = "function_call"


class CustomCallReplyItem(Struct):
    id: str
    status: Status
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET
    type: str = "custom_tool_call"


class ShellCallItem(Struct):
    """A call of a shell of either kind."""

    id: str
    status: Status
    call_id: str
    action: dict[str, Any]
    type: str


class PatchCallItem(Struct):
    id: str
    status: Status
    call_id: str
    operation: dict[str, Any]
    type: str = "apply_patch_call"


ReplyItem = MessageItem | ReasoningReplyItem | CallReplyItem | CustomCallReplyItem | ShellCallItem | PatchCallItem


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: str


class Response(Struct):
    """A response, together with the fields of its request."""

    id: str
    created_at: int
    model: str
    status: Status
    output: list[ReplyItem]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_p: float
    truncation: str
    parallel_tool_calls: bool
    max_tool_calls: int | None
    """From the request. It is about OpenAI's own tools, which do not exist here."""
    top_logprobs: int
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    completed_at: int | None = None
    background: bool = False
    service_tier: str = "default"
    object: str = "response"
    flaws: list[str] | UnsetType = UNSET
    """What was malformed in the model's output; no text is lost."""


class Deleted(Struct, frozen=True):
    id: str
    deleted: bool = True
    object: str = "response"


class InputTokens(Struct, frozen=True):
    input_tokens: int
    object: str = "response.input_tokens"


class ItemList(Struct, frozen=True):
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


# ---- events ----------------------------------------------------------------------------------------------------------


class Event(Struct, kw_only=True):
    type: str
    sequence_number: int = 0
    """Set when it is sent."""


class ResponseEvent(Event, kw_only=True):
    response: Response


class ItemEvent(Event, kw_only=True):
    output_index: int
    item: ReplyItem


class PartEvent(Event, kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningReplyText


class PieceEvent(Event, kw_only=True):
    """A piece of an item's text, arguments or input; in an event whose type ends in ``done``, all of it."""

    item_id: str
    output_index: int
    content_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
