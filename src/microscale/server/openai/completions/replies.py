"""Replies of ``/v1/completions``, whole and streamed."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from microscale.server.openai.usage import Usage


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
