"""What becomes a prompt: the messages, the tools, and how to render them. Every API's request becomes this."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from microscale.server.requests.body import MANY, Body
from microscale.server.requests.messages import ChatMessage
from microscale.server.requests.tools import NamedTool, ToolSpec

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Verbosity = Literal["low", "medium", "high"]


class TemplateOptions(Body):
    """vLLM's ``chat_template_kwargs``: those that a model here has. The others are passed over."""

    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None


class ChatFields(Body):
    """What becomes a prompt."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MANY, fail_fast=True)]
    tools: Annotated[list[ToolSpec], Field(max_length=MANY, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    """False: the turn ends with its first call."""
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Verbosity | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The last message is the assistant's and not yet complete: the answer goes on where it stops."""

    @model_validator(mode="after")
    def _one_ending(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise PydanticCustomError(
                "conflict", "and add_generation_prompt cannot both be true", {"field": "continue_final_message"}
            )
        return self
