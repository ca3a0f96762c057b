"""Bytes that small ops must move; their arithmetic is negligible. Same names as in ``reference.py``."""

from __future__ import annotations

from microscale.kernels.small.spec import SmallSpec


def add_rms_norm(spec: SmallSpec) -> int:
    """Tokens and residual in, norm and sum out, and the weight."""
    return (4 * spec.tokens + 1) * spec.hidden * spec.activations.itemsize


def add_norm_route(spec: SmallSpec) -> int:
    """Tokens and residual in, norm, sum, ids and weights out, and the router."""
    router = spec.num_experts * (spec.hidden + 1) * spec.activations.itemsize
    return add_rms_norm(spec) + router + 8 * spec.tokens * spec.top_k


def rope_and_write_kv(spec: SmallSpec) -> int:
    """Queries, keys and values in and out, once."""
    heads = spec.num_heads + 2 * spec.num_kv_heads
    return 2 * spec.tokens * heads * spec.head_dim * spec.activations.itemsize


def gated(spec: SmallSpec, units: int = 1) -> int:
    """Gate and up in, ``units`` out."""
    return 3 * spec.tokens * units * spec.activations.itemsize


def per_layer(spec: SmallSpec) -> int:
    """All of them, as often as one decoder layer runs them."""
    return add_rms_norm(spec) + rope_and_write_kv(spec) + add_norm_route(spec)
