"""Jit code of the grouped expert GEMMs, in plain Triton: for every GPU from Ampere on and batches beyond the smallest.

One program computes ``BLOCK_N`` packed weight rows times one tile of up to ``BLOCK_M`` pairs of one expert:

    acc [BLOCK_N, BLOCK_M] = W [BLOCK_N, BLOCK_K] @ x[rows].T [BLOCK_K, BLOCK_M]      summed over K

How packed words become operands, and the order of their columns: ``kernels/operands_jit.py``.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton
import triton.language as tl

from microscale.kernels.gate_jit import gated
from microscale.kernels.mxfp8_jit import quantise
from microscale.kernels.operands_jit import bf16_tokens, bf16_weights, dot, dot_scaled, e4m3_weights, unscale, x_scales
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
def _rows_of(order_ptr, start, count, first, TOP_K: tl.constexpr, PART_M: tl.constexpr):
    """The rows of x for columns ``first ..`` of a tile: tokens of the pairs, or (``TOP_K`` 0) the places themselves.

    Columns past the tile's pairs repeat its last pair; their results are not stored.
    """
    place = start + tl.minimum(first + tl.arange(0, PART_M), count - 1)
    if TOP_K == 0:
        return place.to(tl.int64)
    else:
        return (tl.load(order_ptr + place) // TOP_K).to(tl.int64)


@triton.jit
def _accumulate(
    x_ptr,  # bf16 [.., k], or E4M3 codes in fragment order
    xs_ptr,  # E4M3: scale words [.., ceil(k / 128)]
    stride_x,
    words_ptr,
    scales_ptr,
    order_ptr,
    expert,
    block_n,
    start,
    count,
    rows,
    k,
    TOP_K: tl.constexpr,
    BITS: tl.constexpr,
    MX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART_M: tl.constexpr,
    QUADS: tl.constexpr,
    STAGES: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """The products of one tile: a tuple of float32 [BLOCK_N, PART_M]. Past ``k`` both sides are read as zero.

    Columns are computed in parts of ``PART_M``: where all warps lie along the rows each warp unpacks only its own
    weights. A single 128 x 64 product on mma.sync has 2 x 2 warps, and the weights cross shared memory to be shared.
    """
    R: tl.constexpr = BLOCK_N // 16
    T: tl.constexpr = BLOCK_K // 64
    WORDS: tl.constexpr = 32 * BITS  # of one tile
    SPLIT: tl.constexpr = BITS == 8 and not MX  # one load per group, so that warps lie along the rows here too
    LOAD: tl.constexpr = 128 if SPLIT else T * WORDS
    k_tiles = tl.cdiv(k, 64)
    # Rows past the end read the last row tile again; their results are not stored.
    row_tile = tl.minimum(block_n * R + tl.arange(0, R), rows // 16 - 1)
    tile = (expert.to(tl.int64) * (rows // 16) + row_tile) * k_tiles
    word = tl.arange(0, LOAD)
    scale = tl.arange(0, T * 8)
    column = tl.arange(0, BLOCK_K)
    if QUADS and not MX:
        column = column // 32 * 32 + column // 4 % 4 * 8 + column // 16 % 2 * 4 + column % 4
    word_ptrs = words_ptr + tile[:, None] * WORDS + word[None, :]
    scale_ptrs = scales_ptr + tile[:, None] * 8 + scale[None, :]
    acc = ()
    x_ptrs = ()
    xs_ptrs = ()
    for part in tl.static_range(BLOCK_M // PART_M):
        x_rows = _rows_of(order_ptr, start, count, part * PART_M, TOP_K, PART_M)
        acc = acc + (tl.zeros([BLOCK_N, PART_M], tl.float32),)
        x_ptrs = x_ptrs + (x_ptr + x_rows[:, None] * stride_x + column[None, :],)
        xs_ptrs = xs_ptrs + (xs_ptr + x_rows * tl.cdiv(k, 128),)
    for t in tl.range(0, k_tiles, T, num_stages=STAGES):
        q = tl.load(word_ptrs + t * WORDS, mask=(word < (k_tiles - t) * WORDS)[None, :], other=0)
        if SPLIT:
            q = tl.join(q, tl.load(word_ptrs + t * WORDS + 128))
        s = tl.load(scale_ptrs + t * 8, mask=(scale < (k_tiles - t) * 8)[None, :], other=0)
        q = q.to(tl.uint32, bitcast=True)
        s = s.to(tl.uint32, bitcast=True)
        ws = s
        if MX:
            w, ws = e4m3_weights(q, s, BITS, R, T, PLAIN)
        else:
            w = bf16_weights(q, s, BITS, R, QUADS, PLAIN)
        sums = ()
        for part in tl.static_range(BLOCK_M // PART_M):
            x = tl.load(x_ptrs[part] + t * 64, mask=(column < k - t * 64)[None, :], other=0)
            if MX:
                xs = x_scales(tl.load(xs_ptrs[part] + t // 2), k - t * 64)
                sums = sums + (dot_scaled(w, ws, x, xs, acc[part], PLAIN),)
            else:
                sums = sums + (dot(w, x if QUADS else bf16_tokens(x), acc[part], PLAIN),)
        acc = sums
    return acc


@triton.jit
def gate_up(
    x_ptr, xs_ptr, words_ptr, scales_ptr, bias_ptr,
    h_ptr,  # [pairs, ..] in sorted order: bf16, or E4M3 codes in fragment order
    hs_ptr,  # E4M3: scale bytes [pairs, 4 * ceil(units / 128)]
    tiles_ptr, offsets_ptr, order_ptr, rows, k, stride_x, stride_h,
    TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BITS: tl.constexpr, MX: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PART_M: tl.constexpr,
    QUADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gather, first GEMM, bias and gate: ``h[place] = gate(x[token of place] @ gate_up[expert].T + bias)``."""
    expert, block_n, start, count = _locate(tiles_ptr, offsets_ptr, tl.cdiv(rows, BLOCK_N), BLOCK_M)
    if expert < 0:
        return
    parts = _accumulate(
        x_ptr, xs_ptr, stride_x, words_ptr, scales_ptr, order_ptr, expert, block_n, start, count, rows, k,
        TOP_K, BITS, MX, BLOCK_N, BLOCK_M, BLOCK_K, PART_M, QUADS, STAGES, PLAIN,
    )  # fmt: skip
    UNITS: tl.constexpr = BLOCK_N // 2
    unit = (block_n * UNITS + tl.arange(0, UNITS))[None, :]
    group = (block_n * (UNITS // 32) + tl.arange(0, UNITS // 32))[None, :]
    row = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    for part in tl.static_range(BLOCK_M // PART_M):
        acc = unscale(parts[part], BITS, MX)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert.to(tl.int64) * rows + row, mask=row < rows, other=0.0)
            acc += bias.to(tl.float32)[:, None]
        pairs = acc.reshape(BLOCK_N // 16, 2, 8, PART_M).permute(0, 2, 3, 1).reshape(UNITS, PART_M, 2)
        g, up = tl.split(pairs)
        h = gated(g, up, GATE, ALPHA, LIMIT).trans()  # [PART_M, UNITS]
        m = part * PART_M + tl.arange(0, PART_M)
        place = (start + m).to(tl.int64)[:, None]
        ok = (m < count)[:, None]
        if MX:
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
    HAS_BIAS: tl.constexpr, BITS: tl.constexpr, MX: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PART_M: tl.constexpr,
    QUADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Second GEMM, bias and routing weight: ``parts[pair] = weight[pair] * (h[place] @ down[expert].T + bias)``."""
    expert, block_n, start, count = _locate(tiles_ptr, offsets_ptr, tl.cdiv(rows, BLOCK_N), BLOCK_M)
    if expert < 0:
        return
    parts = _accumulate(
        h_ptr, hs_ptr, stride_h, words_ptr, scales_ptr, order_ptr, expert, block_n, start, count, rows, k,
        0, BITS, MX, BLOCK_N, BLOCK_M, BLOCK_K, PART_M, QUADS, STAGES, PLAIN,
    )  # fmt: skip
    row = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    for part in tl.static_range(BLOCK_M // PART_M):
        acc = unscale(parts[part], BITS, MX)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert.to(tl.int64) * rows + row, mask=row < rows, other=0.0)
            acc += bias.to(tl.float32)[:, None]
        m = part * PART_M + tl.arange(0, PART_M)
        pair = tl.load(order_ptr + start + tl.minimum(m, count - 1))
        y = acc.trans() * tl.load(weights_ptr + pair)[:, None]
        ok = (m < count)[:, None] & (row < rows)[None, :]
        tl.store(parts_ptr + pair.to(tl.int64)[:, None] * rows + row[None, :], to_bf16(y, PLAIN), mask=ok)
