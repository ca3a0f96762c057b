"""Requests of Anthropic's Messages API. What is not read here is passed over or refused; see ``requests.body``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from microscale.server.anthropic.input_blocks import CACHED, InputMessage, TextOrBlocks, type_of
from microscale.server.requests.body import MANY, Body, Only
from microscale.server.requests.fields import Strings

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
    return "Custom" if type_of(value) in ("", "custom") else "Hosted"


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
