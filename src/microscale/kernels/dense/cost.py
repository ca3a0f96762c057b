"""What a dense layer must at least read and compute, by counting."""

from __future__ import annotations

from microscale.formats import BLOCK, FORMATS
from microscale.kernels.dense.spec import DenseSpec


def weight_bytes(spec: DenseSpec) -> int:
    """Bytes of the weights in their own format, bias included."""
    elements = spec.rows * spec.columns
    bias = 2 * spec.rows if spec.bias else 0
    if spec.weight_format in FORMATS:
        return elements // BLOCK * FORMATS[spec.weight_format].bytes_per_block + bias
    return 2 * elements + bias


def activation_bytes(spec: DenseSpec) -> int:
    """Bytes of the tokens in and out, in two-byte numbers."""
    return 2 * spec.tokens * (spec.rows + spec.columns)


def dense_flops(spec: DenseSpec) -> int:
    """Multiply-adds, counted as two operations."""
    return 2 * spec.tokens * spec.rows * spec.columns
