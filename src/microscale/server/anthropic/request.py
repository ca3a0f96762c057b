"""Requests of Anthropic's Messages API. Keys that are not listed are ignored or refused; see ``requests.base``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from microscale.server.anthropic.input_blocks import CACHED, AnthropicMessage, TextOrBlocks, type_of
from microscale.server.requests.base import MANY, Body, Only
from microscale.server.requests.fields import Strings
from microscale.server.requests.sampling import CommonSampling

BILLING = "x-anthropic-billing-header"
"""Claude Code begins a system block for Anthropic's billing with this. In some versions it changes with every turn, and
would keep the prefix cache from matching, so the block is left out of the prompt."""
MARKS: Mapping[str, str] = {
    **CACHED,
    "metadata": "is for the client's own records",
    "service_tier": "there is only one tier",
    "speed": "there is only one speed",
    "inference_geo": "the model runs here",
    "user_profile_id": "identifies the user",
    "workspace_id": "identifies the user",
    "diagnostics": "asks about a cache that is not Anthropic's",
    "context_management": "the conversation is used as sent",
    "container": "belongs to tools that run at Anthropic",
    "mcp_servers": "tools that run on a server are ignored",
    "fallbacks": "names other models, and only one is served",
    "fallback_credit_token": "there is nothing to pay",
    f"system.{BILLING}": "is about Anthropic's billing",
}
"""Keys that are harmless whatever their value, with the reason."""
UNMET: Mapping[str, Only] = {
    # Anthropic's client then sends the whole conversation by itself; see ``errors.CODES``.
    "thread": Only((), "conversations are not stored; send all messages"),
    "compaction": Only((), "conversations are not summarized; ask for a summary in a message"),
}
"""Keys that are known but not supported."""


# ---- tools -----------------------------------------------------------------------------------------------------------


class ClientTool(Body):
    HARMLESS: ClassVar[Mapping[str, str]] = {
        **CACHED,
        "defer_loading": "every tool is in the prompt from the beginning",
        "allowed_callers": "the model is the only caller",
        "input_examples": "the model reads the schema",
    }

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    """If true, input is streamed as the model writes it. Otherwise it is held back until it is known to be JSON."""


class HostedTool(Body):
    """A tool that Anthropic runs, or whose schema only its models know: ignored."""

    model_config = ConfigDict(extra="ignore")

    type: str
    name: str | None = None

    def ignored_values(self) -> Iterable[str]:
        return [self.type]


def _tool_kind(value: object) -> str:
    return "Custom" if type_of(value) in ("", "custom") else "Hosted"


AnyTool = Annotated[
    Annotated[ClientTool, Tag("Custom")] | Annotated[HostedTool, Tag("Hosted")],
    Discriminator(_tool_kind),
]


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _tool_has_name(self) -> AnthropicToolChoice:
        if self.type == "tool" and self.name is None:
            raise PydanticCustomError("unsupported_value", "is missing; it must name a tool", {"field": "name"})
        return self


# ---- requests --------------------------------------------------------------------------------------------------------


class Thinking(Body):
    HARMLESS: ClassVar[Mapping[str, str]] = {"block_binding": "blocks may be sent back anywhere"}

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None


class SchemaOutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaOutputFormat | None = None


class CountRequest(Body):
    """``/v1/messages/count_tokens``: the fields that become a prompt."""

    HARMLESS = MARKS

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MANY, fail_fast=True)]
    system: TextOrBlocks | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MANY, fail_fast=True)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaOutputFormat | None = None
    """The older name of ``output_config.format``."""

    def ignored_values(self) -> Iterable[str]:
        blocks = self.system if isinstance(self.system, list) else []
        return [f"system.{BILLING}"] if any(block.text.startswith(f"{BILLING}:") for block in blocks) else []


class MessagesRequest(CountRequest, CommonSampling):
    """``/v1/messages``."""

    ONLY = UNMET

    max_tokens: Annotated[int, Field(ge=0)]
    """0 reads the prompt into the prefix cache and answers nothing. A value that does not fit is reduced."""
    stop_sequences: Strings | None = None
