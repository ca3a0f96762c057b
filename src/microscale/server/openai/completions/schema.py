"""Requests and replies of ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from msgspec import UNSET, Struct, UnsetType
from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from microscale.server.openai.usage import Usage
from microscale.server.requests.base import MANY
from microscale.server.requests.fields import MARKS, Strings, Tokens
from microscale.server.requests.response_format import StructuredFields
from microscale.server.requests.sampling import SamplingFields


def _prompt_kind(value: object) -> str:
    """The variant, by the first element: trying every variant on a long list would take several times as long."""
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
    """``/v1/completions``. A text prompt may contain control tokens by name: the caller decides its format."""

    HARMLESS: ClassVar[Mapping[str, str]] = {**MARKS, "parallel_tool_calls": "a raw prompt has no tools"}

    prompt: Prompt
    add_special_tokens: bool | None = None
    """If false, tokens that the model expects before a text prompt (Gemma's ``<bos>``) are not added."""
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    """Return the prompt before the continuation; with ``logprobs``, its tokens too."""
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    """A field of vLLM: the most likely tokens at each position of the prompt."""

    @model_validator(mode="after")
    def _zero_tokens_need_scores(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise PydanticCustomError(
                "conflict", "must be at least 1, unless echo or prompt_logprobs is set", {"field": "max_tokens"}
            )
        return self


class TextLogprobs(Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """Null for the first token of a prompt."""
    text_offset: list[int]


class PromptLogprob(Struct, frozen=True):
    """One candidate at one position of a prompt, in vLLM's format."""

    logprob: float
    rank: int | None
    """From 1; null for a prompt token that is not among the requested most likely ones."""
    decoded_token: str


class TextChoice(Struct, frozen=True):
    """The same in a stream and in a whole reply."""

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
