"""Token counts of a reply, as OpenAI's clients read them."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from microscale.server.http.exchange import Record


class CachedTokens(Struct, frozen=True):
    cached_tokens: int


class CompletionTokens(Struct, frozen=True):
    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    """From speculative decoding. Both are 0 for a request that ran without drafts."""
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens | UnsetType = UNSET


def usage(record: Record, *, reasoning: bool = False) -> Usage:
    """``reasoning``: say how many tokens were reasoning."""
    cached = CachedTokens(record.cached_tokens)
    total = record.prompt_tokens + record.completion_tokens
    num_reasoning = record.reasoning_tokens if reasoning else UNSET
    details: CompletionTokens | UnsetType = UNSET
    if record.drafts is not None:
        drafted, accepted = record.drafts
        details = CompletionTokens(num_reasoning, accepted, drafted - accepted)
    elif reasoning:
        details = CompletionTokens(num_reasoning)
    return Usage(record.prompt_tokens, record.completion_tokens, total, cached, details)
