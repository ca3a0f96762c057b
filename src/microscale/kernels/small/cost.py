"""Bytes that each small op must move; their arithmetic is negligible. Same names as in ``reference.py``."""

from __future__ import annotations

from microscale.kernels.small.spec import SmallSpec


def rms_norm(spec: SmallSpec) -> int:
    """The tokens in and out, and the weight."""
    return (2 * spec.tokens + 1) * spec.hidden * spec.activations.itemsize


def add_rms_norm(spec: SmallSpec) -> int:
    """Tokens and residual in, norm and sum out, and the weight."""
    return (4 * spec.tokens + 1) * spec.hidden * spec.activations.itemsize


def add_rms_norm_mxfp8(spec: SmallSpec) -> int:
    """As ``add_rms_norm``, with a norm of 33 bytes to 32 numbers."""
    return add_rms_norm(spec) - spec.tokens * (spec.hidden * spec.activations.itemsize - spec.hidden * 33 // 32)


def norm_add_norm(spec: SmallSpec) -> int:
    """With one part and one reader: as ``add_rms_norm``, with the weight of the first norm too."""
    return add_rms_norm(spec) + spec.hidden * spec.activations.itemsize


def norm_add_norm_route(spec: SmallSpec) -> int:
    """With one other reader: as ``norm_add_norm``, with the router's norm weight, ids, weights and the router."""
    router = (spec.num_experts + 1) * spec.hidden * spec.activations.itemsize
    return norm_add_norm(spec) + router + 4 * spec.num_experts + 8 * spec.tokens * spec.top_k


def add_norm_route(spec: SmallSpec) -> int:
    """Tokens and residual in, norm, sum, ids and weights out, and the router."""
    router = spec.num_experts * (spec.hidden + 1) * spec.activations.itemsize
    return add_rms_norm(spec) + router + 8 * spec.tokens * spec.top_k


def norm_pair(spec: SmallSpec) -> int:
    """Tokens' ids, rows of the table and states in, both norms out, and both weights."""
    return (4 * spec.tokens + 2) * spec.hidden * spec.activations.itemsize + 8 * spec.tokens


def likeliest(spec: SmallSpec, blocks: int = 1) -> int:
    """The largest logit of each of ``blocks`` in, one place and one id too, and a guess out."""
    return spec.tokens * (4 * blocks + 4 + 8 + 8)


def rope(spec: SmallSpec) -> int:
    """Queries and keys in and out."""
    heads = spec.num_heads + spec.num_kv_heads
    return 2 * spec.tokens * heads * spec.head_dim * spec.activations.itemsize


def write_kv(spec: SmallSpec) -> int:
    """Keys and values in and out."""
    return 4 * spec.tokens * spec.num_kv_heads * spec.head_dim * spec.activations.itemsize


def rope_and_write_kv(spec: SmallSpec) -> int:
    """Queries, keys and values in and out, once."""
    heads = spec.num_heads + 2 * spec.num_kv_heads
    return 2 * spec.tokens * heads * spec.head_dim * spec.activations.itemsize


def route(spec: SmallSpec) -> int:
    """The router's logits in, ids and weights out."""
    return 4 * spec.tokens * (spec.num_experts + 2 * spec.top_k)


def gated(spec: SmallSpec, units: int = 1) -> int:
    """Gate and up in, ``units`` out."""
    return 3 * spec.tokens * units * spec.activations.itemsize


def per_layer(spec: SmallSpec) -> int:
    """All of them, as often as one decoder layer runs them."""
    return add_rms_norm(spec) + rope_and_write_kv(spec) + add_norm_route(spec)
