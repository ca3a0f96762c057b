"""Jit code of dense layers for batches, in plain Triton: 8-bit and 4-bit weights on every GPU from Ampere on.

One program computes ``BLOCK_N`` rows of the weight times up to ``BLOCK_M`` tokens (``kernels/gemm_core_jit.py``).

    BITS  CHANNELS  MX     weights       activations
    8     yes       no     FP8           bf16; the scale of a row is applied in the epilogue
    8, 4  no        no     MXFP8, MXFP4  bf16
    4     no        no     NVFP4         bf16; likewise (``ROW_SCALES``)
    8, 4  no        yes    MXFP8, MXFP4  MXFP8 by ``mxfp8_jit.quantise_tokens``, on block-scaled matrix instructions
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton
import triton.language as tl

from microscale.kernels.dense.logits_epilogue_jit import block_summary
from microscale.kernels.gemm_core_jit import accumulate
from microscale.kernels.operands_jit import row_scales, unscale
from microscale.kernels.plain_jit import to_bf16


@triton.jit
def _tokens(tile, first, PART_M: tl.constexpr):
    """The tokens of columns ``first ..`` of a tile. Those past the end repeat the last; they are not stored."""
    start, tokens = tile
    return tl.minimum(start + first + tl.arange(0, PART_M), tokens - 1).to(tl.int64)


@triton.jit
def _finish(
    acc, scales_ptr, channels_ptr, bias_ptr, row, rows, k, has_bias,
    BITS: tl.constexpr, ROW_SCALES: tl.constexpr, CHANNELS: tl.constexpr, MX: tl.constexpr,
):  # fmt: skip
    """The formats' constants and scales, plus bias."""
    acc = unscale(acc, BITS, ROW_SCALES, MX)
    if CHANNELS:
        acc *= tl.load(channels_ptr + row, mask=row < rows, other=0.0)[:, None]
    if ROW_SCALES:
        acc *= row_scales(scales_ptr, None, row, rows, k)[:, None]
    bias = tl.load(bias_ptr + row, mask=(row < rows) & (has_bias != 0), other=0.0)
    return acc + bias.to(tl.float32)[:, None]


@triton.jit
def _locate(tokens, BLOCK_M: tl.constexpr):
    """Block of rows and first token. All tokens of a block of rows are neighbours: its weights leave memory once."""
    tiles = tl.cdiv(tokens, BLOCK_M)
    return tl.program_id(0) // tiles, tl.program_id(0) % tiles * BLOCK_M


# Not specialised: see ``small_batch_jit.small_batch``.
@triton.jit(do_not_specialize=["tokens", "stride_residual", "has_bias", "has_residual"])
def gemm(
    x_ptr,  # bf16 [tokens, k], or E4M3 codes in fragment order
    xs_ptr,  # E4M3: scale words [tokens, ceil(k / 128)]
    words_ptr, scales_ptr,
    channels_ptr,  # CHANNELS: float32 [rows]
    bias_ptr,  # bf16 [rows]
    residual_ptr,  # bf16 [tokens, rows]
    y_ptr,  # bf16 [tokens, rows]
    tokens, rows, k, stride_x, stride_residual, has_bias, has_residual,
    BITS: tl.constexpr, ROW_SCALES: tl.constexpr, CHANNELS: tl.constexpr, MX: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PART_M: tl.constexpr,
    QUADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``y = x @ weight.T + bias + residual``. Grid: (blocks of rows * blocks of tokens,)."""
    block_n, start = _locate(tokens, BLOCK_M)
    parts = accumulate(
        x_ptr, xs_ptr, stride_x, words_ptr, scales_ptr, None, block_n, (start, tokens), rows, k,
        _tokens, BITS, ROW_SCALES, CHANNELS, MX, BLOCK_N, BLOCK_M, BLOCK_K, PART_M, QUADS, STAGES, PLAIN,
    )  # fmt: skip
    row = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    for part in tl.static_range(BLOCK_M // PART_M):
        y = _finish(
            parts[part], scales_ptr, channels_ptr, bias_ptr, row, rows, k, has_bias, BITS, ROW_SCALES, CHANNELS, MX
        ).trans()
        token = start + part * PART_M + tl.arange(0, PART_M)
        ok = (token < tokens)[:, None] & (row < rows)[None, :]
        at = token.to(tl.int64)[:, None]
        residual = tl.load(residual_ptr + at * stride_residual + row[None, :], mask=ok & (has_residual != 0), other=0.0)
        tl.store(y_ptr + at * rows + row[None, :], to_bf16(y + residual.to(tl.float32), PLAIN), mask=ok)


@triton.jit(do_not_specialize=["tokens", "has_bias"])
def gemm_logits(
    x_ptr, xs_ptr, words_ptr, scales_ptr, channels_ptr, bias_ptr,
    values_ptr,  # float32 [tokens, rows]
    max_ptr,  # float32 [tokens, blocks of BLOCK_N rows]
    argmax_ptr,  # int32, likewise
    sum_ptr,  # float32, likewise
    tokens, rows, k, stride_x, has_bias,
    BITS: tl.constexpr, ROW_SCALES: tl.constexpr, CHANNELS: tl.constexpr, MX: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PART_M: tl.constexpr,
    QUADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Float32 logits, and what sampling wants of each block of rows. Grid as ``gemm``'s."""
    block_n, start = _locate(tokens, BLOCK_M)
    parts = accumulate(
        x_ptr, xs_ptr, stride_x, words_ptr, scales_ptr, None, block_n, (start, tokens), rows, k,
        _tokens, BITS, ROW_SCALES, CHANNELS, MX, BLOCK_N, BLOCK_M, BLOCK_K, PART_M, QUADS, STAGES, PLAIN,
    )  # fmt: skip
    row = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    for part in tl.static_range(BLOCK_M // PART_M):
        v = _finish(
            parts[part], scales_ptr, channels_ptr, bias_ptr, row, rows, k, has_bias, BITS, ROW_SCALES, CHANNELS, MX
        ).trans()
        token = start + part * PART_M + tl.arange(0, PART_M)
        ok = (token < tokens)[:, None] & (row < rows)[None, :]
        tl.store(values_ptr + token.to(tl.int64)[:, None] * rows + row[None, :], v, mask=ok)
        largest, first, total = block_summary(v, row, rows)
        at = token * tl.cdiv(rows, BLOCK_N) + block_n
        tl.store(max_ptr + at, largest, mask=token < tokens)
        tl.store(argmax_ptr + at, first, mask=token < tokens)
        tl.store(sum_ptr + at, total, mask=token < tokens)
