"""Messages of a conversation. Every API's conversation becomes these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from microscale.server.requests.body import MANY, Body
from microscale.server.requests.fields import Name, only_text


class TextPart(Body):
    type: Annotated[Literal["text"], BeforeValidator(only_text)]
    text: str


Parts = Annotated[list[TextPart], Field(max_length=MANY, fail_fast=True)]


class FunctionCall(Body):
    name: Name
    arguments: str


class PastCall(Body):
    HARMLESS: ClassVar[Mapping[str, str]] = {"index": "calls stand in order"}

    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall


TextOrParts = Annotated[
    Annotated[str, Tag("Text")] | Annotated[Parts, Tag("Parts")],
    Discriminator(lambda value: "Parts" if isinstance(value, list) else "Text"),
]
Content = TextOrParts | None
ECHOED: Mapping[str, str] = {
    "annotations": "is returned by other servers and sent back",
    "refusal": "is returned by other servers and sent back",
    "flaws": "is what we returned",
    "token_ids": "is what we returned",
}


class Instruction(Body):
    HARMLESS: ClassVar[Mapping[str, str]] = {"name": "turns have no names"}

    role: Literal["system", "developer", "user"]
    content: TextOrParts


class AssistantMessage(Body):
    HARMLESS: ClassVar[Mapping[str, str]] = {**ECHOED, "name": "turns have no names"}

    role: Literal["assistant"]
    content: Content = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[PastCall], Field(max_length=MANY, fail_fast=True)] | None = None


class ToolMessage(Body):
    role: Literal["tool"]
    content: TextOrParts
    tool_call_id: Name | None = None
    name: Name | None = None


ChatMessage = Annotated[Instruction | AssistantMessage | ToolMessage, Field(discriminator="role")]
