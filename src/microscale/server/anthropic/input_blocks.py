"""Content blocks of a Messages request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from microscale.server.requests.base import MANY, Body, Only
from microscale.server.requests.fields import Name

CACHED: Mapping[str, str] = {"cache_control": "is a hint; prefixes are matched by content"}
CITATIONS = Only(({"enabled": False},), "the model does not cite blocks")


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
    """Reasoning that only Anthropic can read: ignored."""

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
    """An image, a PDF, a file: anything without text."""

    type: str

    @model_validator(mode="after")
    def _refuse(self) -> NoReturn:
        raise PydanticCustomError("unsupported_value", "this model reads only text", {"field": "type"})


def _source_kind(value: object) -> str:
    return {"text": "Text", "content": "Blocks"}.get(type_of(value), "Other")


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
    """A result of a client's search for tools."""

    HARMLESS = CACHED

    type: Literal["tool_reference"]
    tool_name: str


class UnknownBlock(Body):
    type: str

    @model_validator(mode="after")
    def _refuse(self) -> NoReturn:
        known = ", ".join(BLOCKS)
        raise PydanticCustomError(
            "unsupported_value", "is not a supported block; supported are {known}", {"field": "type", "known": known}
        )


def type_of(value: object) -> str:
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
"""Type → variant. Variant names do not appear in the paths of errors."""


def _block_kind(value: object) -> str:
    return BLOCKS.get(type_of(value), "Other")


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


class AnthropicMessage(Body):
    """Claude Code also sends messages with the role ``system`` between the others."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("Text")] | Annotated[list[Block], Field(max_length=MANY, fail_fast=True), Tag("Blocks")],
        Discriminator(_text_kind),
    ]
