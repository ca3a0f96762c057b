"""The portable GEMM of packed weights, in plain Triton: what dense layers and grouped experts share.

One program computes ``BLOCK_N`` packed weight rows times up to ``BLOCK_M`` rows of x, weights on the left:

    acc [BLOCK_N, BLOCK_M] = W [BLOCK_N, BLOCK_K] @ x[rows].T [BLOCK_K, BLOCK_M]      summed over K

A dense layer is the case of one expert. Which rows of x a program reads is its caller's to say (``ROWS_OF``): tokens
side by side, or those of an expert's pairs. How packed words become operands, and the order of their columns:
``kernels/operands_jit.py``.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton
import triton.language as tl

from microscale.kernels.operands_jit import (
    bf16_tokens,
    bf16_weights,
    dot,
    dot_nvfp4,
    dot_scaled,
    e2m1_weights,
    e4m3_weights,
    x_scales,
)


@triton.jit
def accumulate(
    x_ptr,  # bf16 [.., k]; MX: codes in the order of the weights', E4M3 or (NVFP4) E2M1
    xs_ptr,  # MX: scale words of 128 columns, int32 [.., ceil(k / 128)] or (NVFP4) int64 [.., ceil(k / 128) + 1]
    stride_x,
    words_ptr,
    scales_ptr,  # unused under CHANNELS
    expert,  # None: there is one matrix
    block_n,
    x_rows,  # what ROWS_OF(x_rows, first, PART_M) finds the int64 rows of x by, for columns ``first ..`` of the tile
    rows,
    k,
    ROWS_OF: tl.constexpr,
    BITS: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    CHANNELS: tl.constexpr,
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

    CHANNELS: FP8 weights, whose scales of rows the caller applies. Likewise
    ROW_SCALES (``operands_jit.row_scales``), of NVFP4 and FP8 blocks.
    MX with ROW_SCALES: tokens are NVFP4 too, and their own scales are applied.
    Columns are computed in parts of ``PART_M``: where all warps lie along the rows each warp unpacks only its own
    weights. A single 128 x 64 product on mma.sync has 2 x 2 warps, and the weights cross shared memory to be shared.
    """
    NVFP4: tl.constexpr = MX and ROW_SCALES
    tl.static_assert(not MX or BLOCK_K == 128, "a word of x's scales is for 128 columns")
    R: tl.constexpr = BLOCK_N // 16
    T: tl.constexpr = BLOCK_K // 64
    WORDS: tl.constexpr = 32 * BITS  # of one tile
    SPLIT: tl.constexpr = BITS == 8 and not MX  # one load per group, so that warps lie along the rows here too
    LOAD: tl.constexpr = 128 if SPLIT else T * WORDS
    k_tiles = tl.cdiv(k, 64)
    # Rows past the end read the last row tile again; their results are not stored.
    row_tile = tl.minimum(block_n * R + tl.arange(0, R), rows // 16 - 1)
    row_tile = row_tile.to(tl.int64) if expert is None else expert.to(tl.int64) * (rows // 16) + row_tile
    tile = row_tile * k_tiles
    word = tl.arange(0, LOAD)
    scale = tl.arange(0, T * 8)
    column = tl.arange(0, BLOCK_K // 2 if NVFP4 else BLOCK_K)
    if QUADS and not MX:
        column = column // 32 * 32 + column // 4 % 4 * 8 + column // 16 % 2 * 4 + column % 4
    word_ptrs = words_ptr + tile[:, None] * WORDS + word[None, :]
    if ROW_SCALES:
        # Pairs of words: as many of single ones are more than threads, and Triton would then choose the layout of the
        # weights after theirs, and take them through shared memory.
        scales_ptr = scales_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
        tile += row_tile  # the scales of each row tile's rows
    scale_ptrs = scales_ptr + tile[:, None] * 8 + scale[None, :]
    acc = ()
    x_ptrs = ()
    xs_ptrs = ()
    for part in tl.static_range(BLOCK_M // PART_M):
        row = ROWS_OF(x_rows, part * PART_M, PART_M)
        acc = acc + (tl.zeros([BLOCK_N, PART_M], tl.float32),)
        x_ptrs = x_ptrs + (x_ptr + row[:, None] * stride_x + column[None, :],)
        xs_ptrs = xs_ptrs + (xs_ptr + row * (tl.cdiv(k, 128) + NVFP4),)
    for t in tl.range(0, k_tiles, T, num_stages=STAGES):
        q = tl.load(word_ptrs + t * WORDS, mask=(word < (k_tiles - t) * WORDS)[None, :], other=0)
        if SPLIT:
            q = tl.join(q, tl.load(word_ptrs + t * WORDS + 128))
        q = q.to(tl.uint32, bitcast=True)
        if CHANNELS:
            s = tl.full([R, T * 8], 0x7F7F7F7F, tl.uint32)  # every group times 1
        else:
            s = tl.load(scale_ptrs + t * 8, mask=(scale < (k_tiles - t) * 8)[None, :], other=0)
            s = s.to(tl.uint64 if ROW_SCALES else tl.uint32, bitcast=True)
        ws = s
        if NVFP4:
            w, ws = e2m1_weights(q, s, R, T, PLAIN)
        elif MX:
            w, ws = e4m3_weights(q, s, BITS, R, T, PLAIN)
        else:
            w = bf16_weights(q, s, BITS, ROW_SCALES, R, QUADS, PLAIN)
        sums = ()
        for part in tl.static_range(BLOCK_M // PART_M):
            if NVFP4:
                x = tl.load(x_ptrs[part] + t * 32)
                sums = sums + (dot_nvfp4(w, ws, x, tl.load(xs_ptrs[part] + t // 2), acc[part], PLAIN),)
            elif MX:
                x = tl.load(x_ptrs[part] + t * 64, mask=(column < k - t * 64)[None, :], other=0)
                xs = x_scales(tl.load(xs_ptrs[part] + t // 2), k - t * 64)
                sums = sums + (dot_scaled(w, ws, x, xs, acc[part], PLAIN),)
            else:
                x = tl.load(x_ptrs[part] + t * 64, mask=(column < k - t * 64)[None, :], other=0)
                sums = sums + (dot(w, x if QUADS else bf16_tokens(x), acc[part], PLAIN),)
        acc = sums
    if NVFP4:
        scaled = ()
        for part in tl.static_range(BLOCK_M // PART_M):
            own = tl.load(xs_ptrs[part] + tl.cdiv(k, 128)).to(tl.int32).to(tl.float32, bitcast=True)
            scaled = scaled + (acc[part] * own[None, :],)
        acc = scaled
    return acc
