"""What a dense layer must at least read and compute, by counting."""

from __future__ import annotations

from microscale.formats import FORMATS
from microscale.kernels.dense.spec import DenseSpec

# Fraction of the sheet's bandwidth that lm_head (201088 x 2880) reaches at 1 and at 16 tokens, measured on an H200 with
# Triton 3.6.0: bf16 275 and 278 us, fp8 138 and 145, mxfp8 143 and 148, mxfp4 84 and 107. Elsewhere an assumption.
SMALL_BATCH_REACHED = {
    "bf16": (0.88, 0.87),
    "fp8": (0.87, 0.83),
    "mxfp8": (0.87, 0.84),
    "mxfp4": (0.76, 0.60),
    "nvfp4": (0.76, 0.60),  # not measured: that of mxfp4
    "fp8_block": (0.87, 0.84),  # not measured: that of mxfp8
}
# Large products: 800 of 989 TFLOP/s (the same card). Few tokens: 281 us for lm_head, 11 for 5120 x 2880.
CUBLAS_REACHED = 0.8


def weight_bytes(spec: DenseSpec) -> int:
    """Bytes of the weights in their own format, bias included."""
    elements = spec.rows * spec.columns
    bias = 2 * spec.rows if spec.bias else 0
    if spec.weight_format in FORMATS:
        fmt = FORMATS[spec.weight_format]
        return elements // fmt.block * fmt.bytes_per_block + fmt.row_bytes * spec.rows + bias
    if spec.weight_format == "fp8":
        return elements + 4 * spec.rows + bias
    return 2 * elements + bias


def activation_bytes(spec: DenseSpec) -> int:
    """Bytes of the tokens in and out, in two-byte numbers."""
    return 2 * spec.tokens * (spec.rows + spec.columns)


def dense_flops(spec: DenseSpec) -> int:
    """Multiply-adds, counted as two operations."""
    return 2 * spec.tokens * spec.rows * spec.columns
