"""Requests of ``/v1/responses``: the fields of OpenAI's Responses API, flat tools, and a conversation as items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from microscale.server.body import MANY, Body
from microscale.server.protocol import MARKS, JsonFormat, Name, SchemaFields, TextFormat, format_kind

SENT_BACK: Mapping[str, str] = {
    "id": "is the server's name for what it has said",
    "status": "is what the server returned",
    "annotations": "is what the server returned",
    "logprobs": "is what the server returned",
    "phase": "is what other servers return",
}


class InputText(Body):
    HARMLESS = SENT_BACK

    type: Literal["input_text", "output_text"]
    text: str


InputParts = Annotated[list[InputText], Field(max_length=MANY, fail_fast=True)]


class InputMessage(Body):
    HARMLESS = SENT_BACK

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: str | InputParts


class CallItem(Body):
    HARMLESS = SENT_BACK

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str


class CallOutputItem(Body):
    HARMLESS = SENT_BACK

    type: Literal["function_call_output"]
    call_id: Name
    output: str | InputParts


class ReasoningText(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningParts = Annotated[list[ReasoningText], Field(max_length=MANY, fail_fast=True)]


class ReasoningItem(Body):
    HARMLESS = SENT_BACK

    type: Literal["reasoning"]
    content: ReasoningParts | None = None
    summary: ReasoningParts | None = None


KINDS = {"function_call": "Call", "function_call_output": "CallOutput", "reasoning": "Reasoning"}


def _item_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return KINDS.get(kind if isinstance(kind, str) else "", "Message")


Item = Annotated[
    Annotated[InputMessage, Tag("Message")]
    | Annotated[CallItem, Tag("Call")]
    | Annotated[CallOutputItem, Tag("CallOutput")]
    | Annotated[ReasoningItem, Tag("Reasoning")],
    Discriminator(_item_kind),
]


Input = Annotated[
    Annotated[str, Tag("Text")]
    | Annotated[list[Item], Field(min_length=1, max_length=MANY, fail_fast=True), Tag("Items")],
    Discriminator(lambda value: "Items" if isinstance(value, list) else "Text"),
]


class FunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class Reasoning(Body):
    effort: Literal["low", "medium", "high"] | None = None
    summary: Literal["auto"] | None = None
    """Reasoning is returned as it is, so there is nothing to sum up; ``auto`` is content with that."""


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


class ResponsesRequest(Body):
    """``/v1/responses``."""

    HARMLESS: ClassVar[Mapping[str, str]] = {name: why for name, why in MARKS.items() if name != "metadata"}

    model: str | None = None
    input: Input
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MANY, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None
    """Kept unless it is false, as OpenAI has it."""
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=8)] | None = None
    """Reasoning is returned in the clear, so whoever asks for it encrypted can send it back too."""
    # Not OpenAI's, as in the other two endpoints.
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    cache_prompt: bool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
