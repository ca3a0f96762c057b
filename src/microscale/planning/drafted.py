"""For predictions: attention specs of decoding steps, with drafts and without, and how many experts tokens use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from microscale.kernels.attention.spec import AttentionSpec, BatchShape
from microscale.kernels.moe.cost import expected_experts
from microscale.kernels.moe.spec import MoeSpec
from microscale.planning.estimate import DECODING_TOKENS


def decoding(spec: AttentionSpec, sequences: int, context: int, kv_fp8: bool) -> AttentionSpec:
    """One new token of each sequence."""
    shape = None
    if sequences > DECODING_TOKENS:  # otherwise so many tokens would count as one prompt
        shape = BatchShape(sequences, 1, -(-context // spec.page_size), kv_fp8)
    return replace(spec, tokens=sequences, context=context, batch=shape)


def verified(spec: AttentionSpec, sequences: int, drafts: int, context: int, kv_fp8: bool) -> AttentionSpec:
    """Attention of sequences that each have their next token and so many drafts: these read their keys together."""
    pages = -(-(context + drafts) // spec.page_size)
    shape = BatchShape(sequences, 1 + drafts, pages, kv_fp8, verify=True)
    return replace(spec, tokens=sequences * (1 + drafts), context=context, batch=shape)


def distinct_experts(spec: Any, tokens: int) -> float:
    """Experts of a layer that so many tokens are expected to use, where they spread evenly."""
    assert isinstance(spec, MoeSpec)
    return expected_experts(replace(spec, tokens=tokens))
