"""What becomes a prompt: messages, tools, and how to render them. Every API's request becomes ``ChatFields``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from microscale.server.requests.base import MANY, Body
from microscale.server.requests.fields import Name, only_text


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class TextPart(Body):
    type: Annotated[Literal["text"], BeforeValidator(only_text)]
    text: str


Parts = Annotated[list[TextPart], Field(max_length=MANY, fail_fast=True)]


class FunctionCall(Body):
    name: Name
    arguments: str


class PastCall(Body):
    HARMLESS: ClassVar[Mapping[str, str]] = {"index": "calls are in order"}

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


class TextMessage(Body):
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


ChatMessage = Annotated[TextMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class MessageBuilder:
    """Builds messages from the parts of other APIs. An assistant's reasoning, text and calls become one message."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._reasoning: list[str] = []
        self._content: str | None = None
        self._calls: list[PastCall] = []

    def think(self, text: str) -> None:
        if self._content is not None or self._calls:
            self._flush()
        if text:
            self._reasoning.append(text)

    def say(self, text: str) -> None:
        if self._content is not None or self._calls:
            self._flush()
        self._content = text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        self._calls.append(PastCall(id=call_id, function=FunctionCall(name=name, arguments=arguments)))

    def add(self, message: ChatMessage) -> None:
        self._flush()
        self._messages.append(message)

    def messages(self) -> list[ChatMessage]:
        self._flush()
        return self._messages

    def _flush(self) -> None:
        if self._reasoning or self._content is not None or self._calls:
            message = AssistantMessage(
                role="assistant",
                content=self._content,
                reasoning="\n".join(self._reasoning) or None,
                tool_calls=self._calls or None,
            )
            self._messages.append(message)
        self._reasoning, self._content, self._calls = [], None, []


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Verbosity = Literal["low", "medium", "high"]


class TemplateOptions(Body):
    """vLLM's ``chat_template_kwargs``: those that a model here has. Others are ignored."""

    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None


class ChatFields(Body):
    """What becomes a prompt."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MANY, fail_fast=True)]
    tools: Annotated[list[ToolSpec], Field(max_length=MANY, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    """If false, the turn ends with its first call."""
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Verbosity | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The last message is an incomplete one of the assistant's: the answer continues it."""

    @model_validator(mode="after")
    def _one_ending(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise PydanticCustomError(
                "conflict", "and add_generation_prompt cannot both be true", {"field": "continue_final_message"}
            )
        return self
