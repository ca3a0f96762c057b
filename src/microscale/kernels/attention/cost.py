"""What attention must at least read and compute, by counting."""

from __future__ import annotations

from microscale.kernels.attention.spec import AttentionSpec


def visible(spec: AttentionSpec) -> int:
    """Positions that one query sees."""
    return spec.context if spec.window is None else min(spec.context, spec.window)


def kv_bytes(spec: AttentionSpec) -> int:
    """Bytes of keys and values that one decoding token reads, times the tokens."""
    size = spec.activations.itemsize
    return 2 * spec.tokens * visible(spec) * spec.num_kv_heads * spec.head_dim * size


def attention_flops(spec: AttentionSpec) -> int:
    """Multiply-adds of scores and of the weighted sum, counted as two operations each."""
    return 4 * spec.tokens * visible(spec) * spec.num_heads * spec.head_dim
