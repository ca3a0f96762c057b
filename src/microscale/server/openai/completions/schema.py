"""Requests and replies of ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from msgspec import UNSET, Struct, UnsetType
from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from microscale.server.openai.usage import Usage
from microscale.server.requests.body import MANY
from microscale.server.requests.fields import MARKS, Strings, Tokens
from microscale.server.requests.response_format import StructuredFields
from microscale.server.requests.sampling import SamplingFields


def _prompt_kind(value: object) -> str:
    """By the first element: to try every kind on a long list would take as many times as long."""
    if not isinstance(value, list):
        return "Text"
    first = value[0] if value else None
    return "Texts" if isinstance(first, str) else "Lists" if isinstance(first, list) else "Ids"


Prompt = Annotated[
    Annotated[str, Tag("Text")]
    | Annotated[Strings, Tag("Texts")]
    | Annotated[Tokens, Tag("Ids")]
    | Annotated[list[Tokens], Field(max_length=MANY, fail_fast=True), Tag("Lists")],
    Discriminator(_prompt_kind),
]


class CompletionRequest(SamplingFields, StructuredFields):
    """``/v1/completions``. A text prompt may hold control tokens by name: its format is the caller's."""

    HARMLESS: ClassVar[Mapping[str, str]] = {**MARKS, "parallel_tool_calls": "a raw prompt has no tools"}

    prompt: Prompt
    add_special_tokens: bool | None = None
    """False: nothing is put before a text prompt that its model expects there (Gemma's ``<bos>``)."""
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    """The prompt before the continuation; with ``logprobs`` its tokens too."""
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    """vLLM's: the most likely tokens at each place of the prompt."""

    @model_validator(mode="after")
    def _nothing_needs_a_reason(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise PydanticCustomError(
                "conflict", "may be 0 only with echo or prompt_logprobs; else at least 1", {"field": "max_tokens"}
            )
        return self


class TextLogprobs(Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """Null for the first token of a prompt: nothing stands before it."""
    text_offset: list[int]


class PromptLogprob(Struct, frozen=True):
    """vLLM's, of one token at one place of a prompt."""

    logprob: float
    rank: int | None
    """From 1; null for a token of the prompt that is not among the most likely that were asked for."""
    decoded_token: str


class TextChoice(Struct, frozen=True):
    """The same in a stream and at once."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: TextLogprobs | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    stop_reason: str | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class TextReply(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"
