"""Bytes that each small op must move; their arithmetic is negligible. Same names as in ``reference.py``."""

from __future__ import annotations

from microscale.kernels.op import torch_dtype
from microscale.kernels.small.spec import SmallSpec


def rms_norm(spec: SmallSpec) -> int:
    """The tokens in and out, and the weight."""
    return (2 * spec.tokens + 1) * spec.hidden * torch_dtype(spec.activations).itemsize


def rope(spec: SmallSpec) -> int:
    """Queries and keys in and out."""
    heads = spec.num_heads + spec.num_kv_heads
    return 2 * spec.tokens * heads * spec.head_dim * torch_dtype(spec.activations).itemsize


def write_kv(spec: SmallSpec) -> int:
    """Keys and values in and out."""
    return 4 * spec.tokens * spec.num_kv_heads * spec.head_dim * torch_dtype(spec.activations).itemsize


def rope_and_write_kv(spec: SmallSpec) -> int:
    """Queries, keys and values in and out, once."""
    heads = spec.num_heads + 2 * spec.num_kv_heads
    return 2 * spec.tokens * heads * spec.head_dim * torch_dtype(spec.activations).itemsize


def route(spec: SmallSpec) -> int:
    """The router's logits in, ids and weights out."""
    return 4 * spec.tokens * (spec.num_experts + 2 * spec.top_k)


def per_layer(spec: SmallSpec) -> int:
    """All of them, as often as one decoder layer runs them."""
    return 2 * rms_norm(spec) + rope_and_write_kv(spec) + route(spec)
