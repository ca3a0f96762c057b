"""Jit code of NVFP4 activations: encode by the rule of ``formats``, in the order that the GEMMs read.

A token's float32 scale follows from its own largest magnitude, so a token gets the same codes whatever it is batched
with, and no calibrated scale is needed. ``PLAIN`` means arithmetic that Triton's interpreter can run.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton
import triton.language as tl

from microscale.kernels.mxfp8_jit import round_e4m3

_SMALLEST_SCALE: tl.constexpr = tl.constexpr(2.0**-126)
_SMALLEST_BLOCK_SCALE: tl.constexpr = tl.constexpr(2.0**-9)
_LARGEST: tl.constexpr = tl.constexpr(6.0 * 448.0)
_ONE: tl.constexpr = tl.constexpr(0x38)
_NAN: tl.constexpr = tl.constexpr(0x7F)
_TO_INTEGER: tl.constexpr = tl.constexpr(1.5 * 2.0**23)  # added and taken away: float32 rounded to an integer


@triton.jit
def decode_scales(codes):
    """Positive E4M3 codes → float32; 0x7F is NaN."""
    c = codes.to(tl.uint32)
    value = (c << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    return tl.where(c == 0x7F, float("nan"), value)


@triton.jit
def decode_e2m1(values, scales):
    """E2M1 codes [N, K / 2], two to a byte, and float32 scales [N, K / 16] → float32 [N, K]."""
    N: tl.constexpr = values.shape[0]
    K: tl.constexpr = 2 * values.shape[1]
    c = tl.join(values & 0xF, values >> 4).to(tl.uint32)
    value = (((c & 7) << 22) | ((c & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126
    return (value.reshape(N, K // 16, 16) * scales.reshape(N, K // 16, 1)).reshape(N, K)


@triton.jit
def _round_e2m1(v):
    """float32 → the nearest E2M1 code, ties to even, saturating at 6."""
    a = tl.minimum(tl.abs(v), 6.0)
    # Below 2 codes are halves, then ones, then twos.
    halves = tl.where(a < 2.0, a * 2.0, tl.where(a < 4.0, a, a * 0.5))
    code = (halves + _TO_INTEGER).to(tl.uint32, bitcast=True) & 7
    code += tl.where(a < 2.0, 0, tl.where(a < 4.0, 2, 4)).to(tl.uint32)
    return code | ((v.to(tl.uint32, bitcast=True) >> 28) & 8)


@triton.jit(do_not_specialize=["rows"])
def quantise_rows(
    x_ptr,  # bf16 [rows, k]
    codes_ptr,  # uint8 [rows, ceil(k / 128) * 64], in the GEMMs' order
    words_ptr,  # int64 [rows, ceil(k / 128) + 1]: the E4M3 scales of 128 columns each, and then the row's in float32
    rows, k, stride_x, PLAIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows in NVFP4, each under its own float32 scale. Columns from ``k`` to the next multiple of 128 become zeros."""
    GROUPS: tl.constexpr = COLUMNS // 16
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[:, None]
    x = tl.load(x_ptr + at * stride_x + column[None, :], mask=(row < rows)[:, None] & (column < k)[None, :], other=0.0)
    # bf16 is the upper half of float32; so written, the interpreter gets subnormals right too.
    x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True).reshape(ROWS, GROUPS, 16)
    finite = tl.max(x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF, axis=2) < 0x7F800000
    x = tl.where(finite.reshape(ROWS, GROUPS, 1), x, 0.0)
    largest = tl.max(tl.abs(x), axis=2)
    peak = tl.max(largest, axis=1)
    row_scale = tl.where(peak == 0, 1.0, tl.maximum(tl.div_rn(peak, _LARGEST), _SMALLEST_SCALE))[:, None]
    wanted = tl.maximum(tl.div_rn(largest, 6.0 * row_scale), _SMALLEST_BLOCK_SCALE)
    scale = tl.where(largest == 0, _ONE, round_e4m3(wanted, PLAIN)).to(tl.uint8)
    divisor = (decode_scales(scale) * row_scale).reshape(ROWS, GROUPS, 1)
    codes = _round_e2m1(tl.div_rn(x, tl.broadcast_to(divisor, x.shape)))
    codes = codes.reshape(ROWS, COLUMNS // 8, 2, 2, 2).permute(0, 1, 4, 2, 3)  # column 4 a + 2 b + p: p a | b
    high, low = tl.split(codes)
    width = tl.cdiv(k, 128) * 64
    column = tl.arange(0, COLUMNS // 2)
    ok = (row < rows)[:, None] & (column < width)[None, :]
    codes = (low | (high << 4)).to(tl.uint8).reshape(ROWS, COLUMNS // 2)
    tl.store(codes_ptr + at * width + column[None, :], codes, mask=ok)
    bytes_ = tl.where(finite, scale, _NAN).to(tl.int64).reshape(ROWS, COLUMNS // 128, 8)
    words = tl.sum(bytes_ << (8 * tl.arange(0, 8))[None, None, :], axis=2)
    word = tl.arange(0, COLUMNS // 128)
    words_ptr += at * (tl.cdiv(k, 128) + 1)
    tl.store(words_ptr + word[None, :], words, mask=(row < rows)[:, None] & (word < tl.cdiv(k, 128))[None, :])
    own = row_scale.to(tl.int32, bitcast=True).to(tl.int64)
    tl.store(words_ptr + tl.cdiv(k, 128), own, mask=(row < rows)[:, None])
