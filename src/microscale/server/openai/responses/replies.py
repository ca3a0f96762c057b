"""A response, its items and the events of its stream, as OpenAI's clients read them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Struct):
    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    type: str = "output_text"


class ReasoningText(Struct):
    text: str
    type: str = "reasoning_text"


class MessageItem(Struct):
    id: str
    status: Status
    content: list[OutputText]
    role: str = "assistant"
    type: str = "message"


class ReasoningItem(Struct):
    id: str
    status: Status
    content: list[ReasoningText]
    summary: list[Any] = field(default_factory=list)
    encrypted_content: str | UnsetType = UNSET
    type: str = "reasoning"


class CallItem(Struct):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET
    type: str = "function_call"


class CustomCallItem(Struct):
    id: str
    status: Status
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET
    type: str = "custom_tool_call"


class ShellCallItem(Struct):
    """A call of either kind of shell."""

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


Item = MessageItem | ReasoningItem | CallItem | CustomCallItem | ShellCallItem | PatchCallItem


class Cached(Struct, frozen=True):
    cached_tokens: int


class Thought(Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: Cached
    output_tokens: int
    output_tokens_details: Thought
    total_tokens: int


class Failure(Struct, frozen=True):
    code: str
    message: str


class Incomplete(Struct, frozen=True):
    reason: str


class Response(Struct):
    """What was asked stands beside what came of it."""

    id: str
    created_at: int
    model: str
    status: Status
    output: list[Item]
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
    """As it was asked for."""
    max_tool_calls: int | None
    """As it was asked for: OpenAI's own tools are meant, of which there are none here."""
    top_logprobs: int
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    usage: ResponseUsage | None = None
    error: Failure | None = None
    incomplete_details: Incomplete | None = None
    completed_at: int | None = None
    background: bool = False
    service_tier: str = "default"
    object: str = "response"
    flaws: list[str] | UnsetType = UNSET
    """What was malformed in the model's output; none of its text is lost."""


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
    item: Item


class PartEvent(Event, kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class TextEvent(Event, kw_only=True):
    """Some text, or with ``done`` all of it."""

    item_id: str
    output_index: int
    content_index: int = 0
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET


class ArgumentsEvent(Event, kw_only=True):
    item_id: str
    output_index: int
    delta: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET


class InputEvent(Event, kw_only=True):
    """Of a custom tool's call."""

    item_id: str
    output_index: int
    delta: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
