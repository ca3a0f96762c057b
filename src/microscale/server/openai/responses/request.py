"""Requests of ``/v1/responses``. Items and tools have their own modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from microscale.server.openai.responses.input_items import AnyItem
from microscale.server.openai.responses.tool_specs import ResponseTools, ToolChoice
from microscale.server.requests.base import MANY, Body, Only
from microscale.server.requests.fields import MARKS
from microscale.server.requests.response_format import JsonFormat, SchemaFields, TextFormat, format_kind
from microscale.server.requests.sampling import CommonSampling

Input = Annotated[
    Annotated[str, Tag("Text")]
    | Annotated[list[AnyItem], Field(min_length=1, max_length=MANY, fail_fast=True), Tag("Items")],
    Discriminator(lambda value: "Items" if isinstance(value, list) else "Text"),
]


class Reasoning(Body):
    HARMLESS: ClassVar[Mapping[str, str]] = {"generate_summary": "is the older name of summary"}

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Has no effect: reasoning is returned in full."""


class FlatSchemaFormat(SchemaFields):
    type: Literal["json_schema"]


TextFormatField = Annotated[
    Annotated[TextFormat, Tag("Text")]
    | Annotated[JsonFormat, Tag("Json")]
    | Annotated[FlatSchemaFormat, Tag("Schema")],
    Discriminator(format_kind),
]


class TextConfig(Body):
    format: TextFormatField | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(Body):
    HARMLESS: ClassVar[Mapping[str, str]] = {"include_obfuscation": "events are not padded"}


SEALED_THOUGHTS = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
REFUSED: Mapping[str, Only] = {
    "background": Only((False,), "answers are not made in the background; stream them"),
    "conversation": Only((), "conversations are continued with previous_response_id"),
    "prompt": Only((), "prompt templates are not stored; send instructions and input"),
    "max_tokens": Only((), "use max_output_tokens"),
    "max_completion_tokens": Only((), "use max_output_tokens"),
    "messages": Only((), "use input"),
    "response_format": Only((), "use text.format"),
    "reasoning_effort": Only((), "use reasoning.effort"),
    "n": Only((1,), "there is one response"),
    "stop": Only(([], ""), "use /v1/chat/completions"),
    "logprobs": Only((False,), f"use include with {LOGPROBS}"),
}
"""Keys that would change the answer: names from other APIs, and features that are not available."""


class ResponsesRequest(CommonSampling):
    """``/v1/responses``."""

    HARMLESS: ClassVar[Mapping[str, str]] = {
        **{name: why for name, why in MARKS.items() if name != "metadata"},
        "client_metadata": "is for the client's own records",
    }
    ONLY = REFUSED

    input: Input
    instructions: str | None = None
    tools: ResponseTools | None = None
    tool_choice: ToolChoice | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    """Responses are stored unless this is false, like OpenAI's."""
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=64, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    """An extension, as in the other APIs."""

    def ignored_values(self) -> Iterable[str]:
        known = (SEALED_THOUGHTS, LOGPROBS)
        return [f"include.{name}" for name in self.include or [] if name not in known]

    def includes(self, name: str) -> bool:
        return name in (self.include or [])

    @property
    def wants_logprobs(self) -> bool:
        return self.includes(LOGPROBS) or bool(self.top_logprobs)
