"""Jit code of the grouped expert GEMMs, in plain Triton: for every GPU from Ampere on and batches beyond the smallest.

One program computes ``BLOCK_N`` packed weight rows times one tile of up to ``BLOCK_M`` pairs of one expert
(``kernels/gemm_core_jit.py``).
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton
import triton.language as tl

from microscale.kernels.gate_jit import gated
from microscale.kernels.gemm_core_jit import accumulate
from microscale.kernels.mxfp8_jit import quantise
from microscale.kernels.operands_jit import row_scales, unscale
from microscale.kernels.plain_jit import to_bf16

# ---- one tile of a grouped GEMM -------------------------------------------------------------------------------------


@triton.jit
def _locate(tiles_ptr, offsets_ptr, blocks_n, BLOCK_M: tl.constexpr):
    """This program's expert (-1: none), block of rows, first place and number of pairs.

    Programs go through all tiles of an expert before the next block of rows: weights leave memory once, then come from
    the L2 cache.
    """
    pid = tl.program_id(0)
    expert = tl.load(tiles_ptr + pid // blocks_n * 4)
    first = tl.load(tiles_ptr + pid // blocks_n * 4 + 3)
    begin = tl.load(offsets_ptr + tl.maximum(expert, 0))
    end = tl.load(offsets_ptr + tl.maximum(expert, 0) + 1)
    tiles = tl.maximum(tl.cdiv(end - begin, BLOCK_M), 1)
    local = pid - first * blocks_n
    start = begin + local % tiles * BLOCK_M
    return expert, local // tiles, start, tl.minimum(end - start, BLOCK_M)


@triton.jit
def _places(tile, first, PART_M: tl.constexpr):
    """The places of columns ``first ..`` of a tile. Those past its pairs repeat the last; they are not stored."""
    start, count = tile
    return (start + tl.minimum(first + tl.arange(0, PART_M), count - 1)).to(tl.int64)


@triton.jit
def _tokens(tile, first, PART_M: tl.constexpr):
    """Likewise, the tokens of the pairs at those places."""
    order_ptr, start, count, TOP_K = tile
    place = start + tl.minimum(first + tl.arange(0, PART_M), count - 1)
    return (tl.load(order_ptr + place) // TOP_K).to(tl.int64)


@triton.jit
def _with_bias(
    acc, scales_ptr, bias_ptr, expert, row, rows, k,
    HAS_BIAS: tl.constexpr, BITS: tl.constexpr, ROW_SCALES: tl.constexpr, MX: tl.constexpr,
):  # fmt: skip
    """The formats' constants and scales of rows, plus the expert's bias."""
    acc = unscale(acc, BITS, ROW_SCALES, MX)
    if ROW_SCALES:
        acc *= row_scales(scales_ptr, expert, row, rows, k)[:, None]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * rows + row, mask=row < rows, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    return acc


@triton.jit
def gate_up(
    x_ptr, xs_ptr, words_ptr, scales_ptr, bias_ptr,
    h_ptr,  # [pairs, ..] in sorted order: bf16, or E4M3 codes in fragment order (MX without ROW_SCALES)
    hs_ptr,  # E4M3: scale bytes [pairs, 4 * ceil(units / 128)]
    tiles_ptr, offsets_ptr, order_ptr, rows, k, stride_x, stride_h,
    TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BITS: tl.constexpr, ROW_SCALES: tl.constexpr, MX: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PART_M: tl.constexpr,
    QUADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gather, first GEMM, bias and gate: ``h[place] = gate(x[token of place] @ gate_up[expert].T + bias)``."""
    expert, block_n, start, count = _locate(tiles_ptr, offsets_ptr, tl.cdiv(rows, BLOCK_N), BLOCK_M)
    if expert < 0:
        return
    parts = accumulate(
        x_ptr, xs_ptr, stride_x, words_ptr, scales_ptr, expert, block_n, (order_ptr, start, count, TOP_K), rows, k,
        _tokens, BITS, ROW_SCALES, False, MX, BLOCK_N, BLOCK_M, BLOCK_K, PART_M, QUADS, STAGES, PLAIN,
    )  # fmt: skip
    UNITS: tl.constexpr = BLOCK_N // 2
    unit = (block_n * UNITS + tl.arange(0, UNITS))[None, :]
    group = (block_n * (UNITS // 32) + tl.arange(0, UNITS // 32))[None, :]
    row = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    for part in tl.static_range(BLOCK_M // PART_M):
        acc = _with_bias(parts[part], scales_ptr, bias_ptr, expert, row, rows, k, HAS_BIAS, BITS, ROW_SCALES, MX)
        pairs = acc.reshape(BLOCK_N // 16, 2, 8, PART_M).permute(0, 2, 3, 1).reshape(UNITS, PART_M, 2)
        g, up = tl.split(pairs)
        h = gated(g, up, GATE, ALPHA, LIMIT).trans()  # [PART_M, UNITS]
        m = part * PART_M + tl.arange(0, PART_M)
        place = (start + m).to(tl.int64)[:, None]
        ok = (m < count)[:, None]
        if MX and not ROW_SCALES:
            # Units past the end are whole groups, because a group never straddles it: they are not stored.
            codes, scales = quantise(h.reshape(PART_M, UNITS // 32, 32), PLAIN)
            tl.store(h_ptr + place * stride_h + unit, codes, mask=ok & (unit < rows // 2))
            stride_hs = tl.cdiv(rows // 2, 128) * 4
            tl.store(hs_ptr + place * stride_hs + group, scales, mask=ok & (group < rows // 64))
        else:
            tl.store(h_ptr + place * stride_h + unit, to_bf16(h, PLAIN), mask=ok & (unit < rows // 2))


@triton.jit
def down(
    h_ptr, hs_ptr, words_ptr, scales_ptr, bias_ptr,
    parts_ptr,  # bf16 [pairs, rows] in pair order
    weights_ptr,  # float32 [pairs]
    tiles_ptr, offsets_ptr, order_ptr, rows, k, stride_h,
    HAS_BIAS: tl.constexpr, BITS: tl.constexpr, ROW_SCALES: tl.constexpr, MX: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PART_M: tl.constexpr,
    QUADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Second GEMM, bias and routing weight: ``parts[pair] = weight[pair] * (h[place] @ down[expert].T + bias)``."""
    expert, block_n, start, count = _locate(tiles_ptr, offsets_ptr, tl.cdiv(rows, BLOCK_N), BLOCK_M)
    if expert < 0:
        return
    parts = accumulate(
        h_ptr, hs_ptr, stride_h, words_ptr, scales_ptr, expert, block_n, (start, count), rows, k,
        _places, BITS, ROW_SCALES, False, MX, BLOCK_N, BLOCK_M, BLOCK_K, PART_M, QUADS, STAGES, PLAIN,
    )  # fmt: skip
    row = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    for part in tl.static_range(BLOCK_M // PART_M):
        acc = _with_bias(parts[part], scales_ptr, bias_ptr, expert, row, rows, k, HAS_BIAS, BITS, ROW_SCALES, MX)
        m = part * PART_M + tl.arange(0, PART_M)
        pair = tl.load(order_ptr + start + tl.minimum(m, count - 1))
        y = acc.trans() * tl.load(weights_ptr + pair)[:, None]
        ok = (m < count)[:, None] & (row < rows)[None, :]
        tl.store(parts_ptr + pair.to(tl.int64)[:, None] * rows + row[None, :], to_bf16(y, PLAIN), mask=ok)
