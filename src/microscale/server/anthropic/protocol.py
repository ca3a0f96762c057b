"""Requests of Anthropic's Messages API. What is not read here is passed over or refused; see ``body``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from microscale.server.body import MANY, Body, Only
from microscale.server.protocol import Name, Strings

CACHED: Mapping[str, str] = {"cache_control": "is a hint; prefixes are found by their content"}
MARKS: Mapping[str, str] = {
    **CACHED,
    "metadata": "is for the client's own records",
    "service_tier": "there is one tier",
    "speed": "there is one speed",
    "inference_geo": "the model runs here",
    "user_profile_id": "names who asks",
    "workspace_id": "names who asks",
    "diagnostics": "asks about a cache that is not Anthropic's",
    "context_management": "the conversation is taken as it was sent",
    "container": "belongs to tools that run at Anthropic",
    "mcp_servers": "tools that run at a server are passed over",
    "fallbacks": "names other models, and one is served",
    "fallback_credit_token": "there is nothing to pay",
}
"""Harmless whatever the value, with the reason."""
UNMET: Mapping[str, Only] = {
    # Anthropic's client then sends the whole conversation by itself; see ``errors.CODES``.
    "thread": Only((), "conversations are not kept; send all of the messages"),
    "compaction": Only((), "conversations are not summarized; ask for a summary in a message"),
}
"""Known, and not to be had."""
CITATIONS = Only(({"enabled": False},), "the model does not cite by block; false is possible")


# ---- blocks ----------------------------------------------------------------------------------------------------------


class TextBlock(Body):
    HARMLESS: ClassVar[Mapping[str, str]] = {**CACHED, "citations": "is what was returned"}

    type: Literal["text"]
    text: str


TextBlocks = Annotated[list[TextBlock], Field(max_length=MANY, fail_fast=True)]


def _text_kind(value: object) -> str:
    return "Blocks" if isinstance(value, list) else "Text"


TextOrBlocks = Annotated[
    Annotated[str, Tag("Text")] | Annotated[TextBlocks, Tag("Blocks")],
    Discriminator(_text_kind),
]


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedBlock(Body):
    """Reasoning that only Anthropic can read: passed over."""

    HARMLESS: ClassVar[Mapping[str, str]] = {"data": "only Anthropic can read it"}

    type: Literal["redacted_thinking"]


class ToolUseBlock(Body):
    HARMLESS: ClassVar[Mapping[str, str]] = {**CACHED, "caller": "is what was returned"}

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


class SearchResultBlock(Body):
    HARMLESS = CACHED
    ONLY: ClassVar[Mapping[str, Only]] = {"citations": CITATIONS}

    type: Literal["search_result"]
    source: str
    title: str
    content: TextBlocks


class TextSource(Body):
    HARMLESS: ClassVar[Mapping[str, str]] = {"media_type": "text is text"}

    type: Literal["text"]
    data: str


class BlocksSource(Body):
    type: Literal["content"]
    content: TextOrBlocks


class Unreadable(Body):
    """An image, a PDF, a file: whatever holds no text."""

    type: str

    @model_validator(mode="after")
    def _refuse(self) -> NoReturn:
        raise PydanticCustomError("unsupported_value", "this model reads text only", {"field": "type"})


def _source_kind(value: object) -> str:
    return {"text": "Text", "content": "Blocks"}.get(_type_of(value), "Other")


class DocumentBlock(Body):
    HARMLESS = CACHED
    ONLY: ClassVar[Mapping[str, Only]] = {"citations": CITATIONS}

    type: Literal["document"]
    source: Annotated[
        Annotated[TextSource, Tag("Text")]
        | Annotated[BlocksSource, Tag("Blocks")]
        | Annotated[Unreadable, Tag("Other")],
        Discriminator(_source_kind),
    ]
    title: str | None = None
    context: str | None = None


class ToolReferenceBlock(Body):
    """What a client's search for tools has found."""

    HARMLESS = CACHED

    type: Literal["tool_reference"]
    tool_name: str


class UnknownBlock(Body):
    type: str

    @model_validator(mode="after")
    def _refuse(self) -> NoReturn:
        known = ", ".join(BLOCKS)
        raise PydanticCustomError(
            "unsupported_value", "is not a block that can be read here: {known} are", {"field": "type", "known": known}
        )


def _type_of(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else ""


BLOCKS: Mapping[str, str] = {
    "text": "Text",
    "thinking": "Thinking",
    "redacted_thinking": "Redacted",
    "tool_use": "Use",
    "tool_result": "Result",
    "search_result": "Found",
    "document": "Document",
    "tool_reference": "Reference",
    "image": "Image",
}
"""Type → the name of the variant, which no path of an error shows."""


def _block_kind(value: object) -> str:
    return BLOCKS.get(_type_of(value), "Other")


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("Text")]
    | Annotated[SearchResultBlock, Tag("Found")]
    | Annotated[DocumentBlock, Tag("Document")]
    | Annotated[ToolReferenceBlock, Tag("Reference")]
    | Annotated[Unreadable, Tag("Image")]
    | Annotated[UnknownBlock, Tag("Other")],
    Discriminator(lambda value: kind if (kind := _block_kind(value)) in RESULT_BLOCKS else "Other"),
]
RESULT_BLOCKS = frozenset({"Text", "Found", "Document", "Reference", "Image"})


class ToolResultBlock(Body):
    HARMLESS = CACHED

    type: Literal["tool_result"]
    tool_use_id: Name
    content: (
        Annotated[
            Annotated[str, Tag("Text")]
            | Annotated[list[ResultBlock], Field(max_length=MANY, fail_fast=True), Tag("Blocks")],
            Discriminator(_text_kind),
        ]
        | None
    ) = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("Text")]
    | Annotated[ThinkingBlock, Tag("Thinking")]
    | Annotated[RedactedBlock, Tag("Redacted")]
    | Annotated[ToolUseBlock, Tag("Use")]
    | Annotated[ToolResultBlock, Tag("Result")]
    | Annotated[SearchResultBlock, Tag("Found")]
    | Annotated[DocumentBlock, Tag("Document")]
    | Annotated[ToolReferenceBlock, Tag("Reference")]
    | Annotated[Unreadable, Tag("Image")]
    | Annotated[UnknownBlock, Tag("Other")],
    Discriminator(_block_kind),
]


class InputMessage(Body):
    """Claude Code also puts messages of the role ``system`` between the others."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("Text")] | Annotated[list[Block], Field(max_length=MANY, fail_fast=True), Tag("Blocks")],
        Discriminator(_text_kind),
    ]


# ---- tools -----------------------------------------------------------------------------------------------------------


class CustomTool(Body):
    HARMLESS: ClassVar[Mapping[str, str]] = {
        **CACHED,
        "defer_loading": "the model hears of every tool at once",
        "allowed_callers": "the model is the only caller",
        "input_examples": "the model reads the schema",
    }

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    """True: input is streamed as the model writes it. Else it is held back until it is known to be JSON."""


class HostedTool(Body):
    """One that Anthropic runs, or whose schema only its models know: passed over."""

    model_config = ConfigDict(extra="ignore")

    type: str
    name: str | None = None


def _tool_kind(value: object) -> str:
    return "Custom" if _type_of(value) in ("", "custom") else "Hosted"


AnyTool = Annotated[
    Annotated[CustomTool, Tag("Custom")] | Annotated[HostedTool, Tag("Hosted")],
    Discriminator(_tool_kind),
]


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _tool_has_name(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise PydanticCustomError("unsupported_value", "is missing: it says which tool", {"field": "name"})
        return self


# ---- requests --------------------------------------------------------------------------------------------------------


class Thinking(Body):
    HARMLESS: ClassVar[Mapping[str, str]] = {"block_binding": "blocks may be handed back anywhere"}

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
    """``/v1/messages/count_tokens``: what becomes a prompt."""

    HARMLESS = MARKS

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MANY, fail_fast=True)]
    system: TextOrBlocks | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MANY, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older name of ``output_config.format``."""


class MessagesRequest(CountRequest):
    """``/v1/messages``."""

    ONLY = UNMET

    max_tokens: Annotated[int, Field(ge=0)]
    """0: read the prompt into the prefix cache and answer nothing. More than fits is cut to what does."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Strings | None = None
    stream: bool | None = None
    # Not Anthropic's, as in the other endpoints.
    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    cache_prompt: bool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
