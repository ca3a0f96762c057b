"""Token counts of a reply, as OpenAI's clients read them."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from microscale.server.http.exchange import Record


class CachedTokens(Struct, frozen=True):
    cached_tokens: int


class ReasoningTokens(Struct, frozen=True):
    reasoning_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


def usage(record: Record, num_reasoning: int | None = None) -> Usage:
    cached = CachedTokens(record.cached_tokens)
    total = record.prompt_tokens + record.completion_tokens
    if num_reasoning is None:
        return Usage(record.prompt_tokens, record.completion_tokens, total, cached)
    return Usage(record.prompt_tokens, record.completion_tokens, total, cached, ReasoningTokens(num_reasoning))
