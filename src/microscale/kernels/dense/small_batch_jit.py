"""Jit code of dense layers for small batches, limited by reading the weights: one kernel for every weight format.

``walk_jit`` has what a program reads and multiplies. ``SLICES`` warps share a row tile along K and add up through
shared memory, always in the same order: no atomics, and one launch however few rows there are.

``small_batch_logits`` stores float32 and, of the program's rows, maximum, its first row, and the sum of exponentials.

Under programmatic dependent launch the first weights are fetched before the kernel waits for the one that makes ``x``.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents

from microscale.kernels.dense.walk_jit import CHANNEL, GROUP, NONE, ROW_SCALES, walk_along_k
from microscale.kernels.small_batch_core_jit import row_scales, sum_slices


@gluon.jit
def load_rows(s_ptr, channel_ptr, bias_ptr, row, rows, k, has_bias, SCALES: gl.constexpr):
    """Bias and, of CHANNEL and ROW_SCALES, scale of each row. Before the walk where its slices are short: behind it the
    fetch is a trip to memory of its own. Programs of many rows have no registers for it (MXFP8 on SM 9.0 spills)."""
    bias = gl.load(bias_ptr + row, mask=(row < rows) & (has_bias != 0), other=0.0)
    if SCALES == CHANNEL:
        channel = gl.load(channel_ptr + row, mask=row < rows, other=0.0)
    elif SCALES == ROW_SCALES:
        channel = row_scales(s_ptr, row, rows, gl.cdiv(k, 64))
    else:
        channel = bias
    return channel, bias


@gluon.jit
def sums_of(acc, of_rows, BITS: gl.constexpr, SCALES: gl.constexpr):
    """Slices added up, the formats' constants and scales applied, plus bias: float32 [16 B, N]."""
    channel, bias = of_rows
    r = sum_slices(acc, BITS, SCALES == ROW_SCALES)
    if SCALES != NONE and SCALES != GROUP:
        r *= channel[:, None]
    return r + bias.to(gl.float32)[:, None]


# Not specialised: a program for one token, or without a bias, would be another kernel than the one that was proved.
@gluon.jit(do_not_specialize=["tokens", "stride_residual", "has_bias", "has_residual"])
def small_batch(
    x_ptr,  # bf16 [tokens, k]
    w_ptr,
    s_ptr,  # GROUP, ROW_SCALES: scale words
    channel_ptr,  # CHANNEL: float32 [rows]
    bias_ptr,  # bf16 [rows]
    residual_ptr,  # bf16 [tokens, rows]
    y_ptr,  # bf16 [tokens, rows]
    tokens,
    rows,
    k,
    stride_x,
    stride_residual,
    has_bias,
    has_residual,
    BITS: gl.constexpr,
    SCALES: gl.constexpr,
    N: gl.constexpr,
    B: gl.constexpr,
    WARPS_N: gl.constexpr,
    SLICES: gl.constexpr,
    AHEAD: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
):
    """``y = x @ weight.T + bias + residual``. Grid: (blocks of N tokens, blocks of 16 B rows): programs that read the
    same weights stand side by side."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, WARPS_N, 1], [1, 16, 8])
    L2: gl.constexpr = gl.SliceLayout(0, mma)
    if PDL:
        gdc_launch_dependents()
    row_tile = gl.program_id(1) * B
    token = gl.program_id(0) * N
    row = row_tile * 16 + gl.arange(0, B * 16, gl.SliceLayout(1, L2))
    if SLICES > 1:
        of_rows = load_rows(s_ptr, channel_ptr, bias_ptr, row, rows, k, has_bias, SCALES)
    acc = walk_along_k(
        x_ptr, w_ptr, s_ptr, row_tile, token, rows, tokens, k, stride_x,
        N, B, WARPS_N, SLICES, AHEAD, BITS, SCALES, EARLY, PDL, mma,
    )  # fmt: skip
    if SLICES == 1:
        of_rows = load_rows(s_ptr, channel_ptr, bias_ptr, row, rows, k, has_bias, SCALES)
    n = token + gl.arange(0, N, gl.SliceLayout(0, L2))
    r = sums_of(acc, of_rows, BITS, SCALES)
    ok = (row < rows)[:, None] & (n < tokens)[None, :]
    at = n.to(gl.int64)[None, :] * stride_residual + row[:, None]
    r += gl.load(residual_ptr + at, mask=ok & (has_residual != 0), other=0.0).to(gl.float32)
    gl.store(y_ptr + (n.to(gl.int64)[None, :] * rows + row[:, None]), r.to(gl.bfloat16), mask=ok)


@gluon.jit(do_not_specialize=["tokens", "has_bias"])
def small_batch_logits(
    x_ptr,
    w_ptr,
    s_ptr,
    channel_ptr,
    bias_ptr,
    values_ptr,  # float32 [tokens, rows]
    max_ptr,  # float32 [tokens, blocks]
    argmax_ptr,  # int32 [tokens, blocks]
    sum_ptr,  # float32 [tokens, blocks]
    tokens,
    rows,
    k,
    stride_x,
    has_bias,
    softcap,  # 0: none
    BITS: gl.constexpr,
    SCALES: gl.constexpr,
    N: gl.constexpr,
    B: gl.constexpr,
    WARPS_N: gl.constexpr,
    SLICES: gl.constexpr,
    AHEAD: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
):
    """Float32 logits, and what sampling wants of each block of 16 B rows. Grid as ``small_batch``'s."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, WARPS_N, 1], [1, 16, 8])
    L2: gl.constexpr = gl.SliceLayout(0, mma)
    LN: gl.constexpr = gl.SliceLayout(0, L2)
    if PDL:
        gdc_launch_dependents()
    row_tile = gl.program_id(1) * B
    token = gl.program_id(0) * N
    acc = walk_along_k(
        x_ptr, w_ptr, s_ptr, row_tile, token, rows, tokens, k, stride_x,
        N, B, WARPS_N, SLICES, AHEAD, BITS, SCALES, EARLY, PDL, mma,
    )  # fmt: skip
    row = row_tile * 16 + gl.arange(0, B * 16, gl.SliceLayout(1, L2))
    of_rows = load_rows(s_ptr, channel_ptr, bias_ptr, row, rows, k, has_bias, SCALES)
    n = token + gl.arange(0, N, LN)
    r = sums_of(acc, of_rows, BITS, SCALES)
    # As in ``logits_epilogue_jit``. Chosen and not branched to, which takes registers.
    r = gl.where(softcap > 0, softcap * (1.0 - 2.0 / (1.0 + gl.exp(r * (2.0 / softcap)))), r)
    inside = (row < rows)[:, None]
    gl.store(values_ptr + (n.to(gl.int64)[None, :] * rows + row[:, None]), r, mask=inside & (n < tokens)[None, :])

    # One 64-bit maximum finds value and row: floats as ordered integers (adding 0 turns -0 into 0, NaN stands above
    # all), and below them the complement of the row, so that among equals the lowest wins.
    bits = (r + 0.0).to(gl.int32, bitcast=True)
    order = gl.where(r != r, 0x7FFFFFFF, gl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    order = gl.where(inside, order, -0x80000000)
    key = (order.to(gl.int64) << 32) | (0x7FFFFFFF - row).to(gl.int64)[:, None]
    best = gl.max(key, axis=0)
    high = (best >> 32).to(gl.int32)
    largest = gl.where(high < 0, high ^ 0x7FFFFFFF, high).to(gl.float32, bitcast=True)
    total = gl.sum(gl.where(inside, gl.exp(r - largest[None, :]), 0.0), axis=0)
    at = n * gl.num_programs(1) + gl.program_id(1)
    gl.store(max_ptr + at, largest, mask=n < tokens)
    gl.store(argmax_ptr + at, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(gl.int32), mask=n < tokens)
    gl.store(sum_ptr + at, total, mask=n < tokens)
