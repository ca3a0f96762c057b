"""Jit code of dense layers for small batches, limited by reading the weights: one kernel for every weight format.

Weights are the left operand of ``mma.sync`` m16n8k16 and ``N`` tokens the right one. A warp walks along K over row
tiles of 16 rows; each lane reads its own fragments in 16-byte loads, a batch of ``AHEAD`` tiles of 64 columns while it
computes the batch before. ``SLICES`` warps share a row tile along K and add up through shared memory, always in the
same order: no atomics, and one launch however few rows there are.

    BITS  SCALES    weights
    16    NONE      bf16, row-major, read as words of two
    8     CHANNEL   E4M3 in fragments (``kernels/layouts.py``), one float32 scale a row, applied in the epilogue
    8     GROUP     MXFP8 in fragments
    4     GROUP     MXFP4 in fragments

Everything but the last, partial batches runs without masks. There, addresses stop at the slice's last tile and the
tokens read as zero. (bf16 weights are masked too: they may hold an infinity, and that times zero is NaN.)

``small_batch_logits`` stores float32 and, of the program's rows, maximum, its first row, and the sum of exponentials.

Under programmatic dependent launch the first weights are fetched before the kernel waits for the one that makes ``x``.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from microscale.kernels.fragments_jit import scale_activations, token_fragments
from microscale.kernels.small_batch_core_jit import (
    add_scaled,
    issue_loads_here,
    pair_layout,
    scale_layout,
    sum_slices,
    token_layout,
    weight_fragments,
)

NONE: tl.constexpr = tl.constexpr(0)
CHANNEL: tl.constexpr = tl.constexpr(1)
GROUP: tl.constexpr = tl.constexpr(2)


@gluon.jit
def _load_batch(walk, t, N: gl.constexpr, BITS: gl.constexpr, SCALES: gl.constexpr, MASKED: gl.constexpr):
    """Tiles t .. t + N of a slice's walk, all in flight when this returns.

    A tile is (weights of group 0, of group 1, scale words); MXFP4 holds both groups in one load. ``MASKED``: tiles past
    the slice's last repeat it, bf16 columns past the end of the slice are zero.
    """
    w_ptrs, w_at, w_end, s_ptrs, s_last = walk
    batch = ()
    for u in gl.static_range(N):
        if BITS == 16:
            at = (t + u) * 32
            if MASKED:
                q0 = gl.load(w_ptrs + at, mask=w_at + at < w_end, other=0, eviction_policy="evict_first")
                q1 = gl.load(w_ptrs + (at + 16), mask=w_at + (at + 16) < w_end, other=0, eviction_policy="evict_first")
            else:
                q0 = gl.load(w_ptrs + at, eviction_policy="evict_first")
                q1 = gl.load(w_ptrs + (at + 16), eviction_policy="evict_first")
            batch = batch + ((q0, q1, q0),)
        else:
            at = (gl.minimum(t + u, w_end) if MASKED else t + u) * (32 * BITS)
            q0 = gl.load(w_ptrs + at, eviction_policy="evict_first")
            q1 = gl.load(w_ptrs + (at + 128), eviction_policy="evict_first") if BITS == 8 else q0
            if SCALES == GROUP:
                s = gl.load(s_ptrs + (gl.minimum(t + u, s_last) if MASKED else t + u) * 8)
            else:
                s = q0
            batch = batch + ((q0, q1, s),)
    issue_loads_here()
    return batch


@gluon.jit
def _bf16_fragments(q, z, LA: gl.constexpr):
    """One group of 32 columns, words [S, B, 2 = h, 32 lanes, 4] → left operands [S, 16 B, 16] of steps j = 0, 1.

    Words and not bf16 travel through the loop: the compiler would hand halves over one by one.
    """
    S: gl.constexpr = q.shape[0]
    B: gl.constexpr = q.shape[1]
    w = gl.inline_asm_elementwise(
        "mov.b32 $0, $1; // $2", "=r,r,r", [q[:, :, :, :, :, None] + z], dtype=gl.bfloat16, is_pure=True, pack=2
    )
    a = w.reshape([S, B, 2, 8, 4, 2, 2, 2]).permute([0, 1, 2, 3, 6, 4, 7, 5])  # h g c t p | j
    a0, a1 = gl.split(a)
    a0 = gl.convert_layout(a0.reshape([S, B * 16, 16]), LA, assert_trivial=True)
    a1 = gl.convert_layout(a1.reshape([S, B * 16, 16]), LA, assert_trivial=True)
    return a0, a1


@gluon.jit
def _load_tokens(inputs, t, MASKED: gl.constexpr):
    """The tokens' two groups of 32 columns of tile ``t``."""
    x_ptrs, x_at, x_end = inputs
    at = t * 64
    if MASKED:
        x0 = gl.load(x_ptrs + at, mask=x_at + at < x_end, other=0.0)
        x1 = gl.load(x_ptrs + (at + 32), mask=x_at + (at + 32) < x_end, other=0.0)
    else:
        x0 = gl.load(x_ptrs + at)
        x1 = gl.load(x_ptrs + (at + 32))
    return x0, x1


@gluon.jit
def _step(acc, tile, x, z, h, BITS: gl.constexpr, SCALES: gl.constexpr, mma: gl.constexpr):
    """``acc`` plus one tile of 64 columns."""
    LA: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    LB: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    x0, x1 = x
    if BITS != 16:
        x0 = scale_activations(x0)
        x1 = scale_activations(x1)
    b00, b01 = token_fragments(x0, LB)
    b10, b11 = token_fragments(x1, LB)
    if BITS == 16:
        a00, a01 = _bf16_fragments(tile[0], z, LA)
        a10, a11 = _bf16_fragments(tile[1], z, LA)
    else:
        a00, a01, a10, a11 = weight_fragments(tile[0], tile[1], z, BITS, LA)
    if SCALES == GROUP:
        acc = add_scaled(acc, (a00, a01, a10, a11), (b00, b01, b10, b11), tile[2], h, mma)
    else:
        acc = mma_v2(a01, b01, mma_v2(a00, b00, acc))
        acc = mma_v2(a11, b11, mma_v2(a10, b10, acc))
    return acc


@gluon.jit
def _batch(
    acc, tiles, inputs, z, h, t,
    N: gl.constexpr, BITS: gl.constexpr, SCALES: gl.constexpr, MASKED: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """``acc`` plus the tiles t .. t + N. The tokens of the next tile are fetched while one is computed, and no earlier:
    ptxas would fetch all of the batch's at once, for which there are no registers."""
    x = _load_tokens(inputs, t, MASKED)
    for u in gl.static_range(N):
        if u + 1 < N:
            later = _load_tokens(inputs, t + (u + 1), MASKED)
            issue_loads_here()
            acc = _step(acc, tiles[u], x, z, h, BITS, SCALES, mma)
            x = later
        else:
            acc = _step(acc, tiles[u], x, z, h, BITS, SCALES, mma)
    return acc


@gluon.jit
def _first_tile(s, k_tiles, S: gl.constexpr):
    """Slices of K differ by at most one tile; each has its first inside of K."""
    return s * k_tiles // S


@gluon.jit
def _row_major(w_ptr, row_tile, rows, k, k_tiles, S: gl.constexpr, B: gl.constexpr, LW: gl.constexpr):
    """Addresses of words [S, B, 2 = h, 32 lanes, 4] of bf16 pairs, their place along K, and the slice's end there.

    Lane (g, t) has columns 8 t .. 8 t + 7 of a group. Rows past the end repeat the last: their results are not stored.
    """
    L5: gl.constexpr = gl.SliceLayout(5, LW)
    L4: gl.constexpr = gl.SliceLayout(4, L5)
    L3: gl.constexpr = gl.SliceLayout(3, L4)
    s = gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(2, L3)))[:, None, None, None, None]
    tile = gl.arange(0, B, gl.SliceLayout(0, gl.SliceLayout(2, L3)))[None, :, None, None, None]
    h = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, L3)))[None, None, :, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L4))))[None, None, None, :, None]
    LC: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L5))))
    word = gl.arange(0, 4, LC)[None, None, None, None, :]
    row = gl.minimum((row_tile + tile) * 16 + h * 8 + lane // 4, rows - 1)
    at = _first_tile(s, k_tiles, S) * 32 + lane % 4 * 4 + word
    end = gl.minimum(_first_tile(s + 1, k_tiles, S) * 32, k // 2)
    return w_ptr + (row.to(gl.int64) * (k // 2) + at), at, end


@gluon.jit
def _fragments(w_ptr, row_tile, rows, k_tiles, S: gl.constexpr, B: gl.constexpr, LP: gl.constexpr, BITS: gl.constexpr):
    """Addresses of words [S, B, 32 lanes, 4], and the slice's last tile. Row tiles past the end repeat the last one."""
    L4: gl.constexpr = gl.SliceLayout(4, LP)
    L3: gl.constexpr = gl.SliceLayout(3, L4)
    s = gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(2, L3)))[:, None, None, None]
    tile = row_tile + gl.arange(0, B, gl.SliceLayout(0, gl.SliceLayout(2, L3)))[None, :, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, L3)))[None, None, :, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L4))))[None, None, None, :]
    first = _first_tile(s, k_tiles, S)
    last = gl.maximum(_first_tile(s + 1, k_tiles, S) - first - 1, 0)
    at = (gl.minimum(tile, rows // 16 - 1) * k_tiles + first).to(gl.int64)
    return w_ptr + (at * (32 * BITS) + (lane * 4 + word)), last


@gluon.jit
def _scale_words(s_ptr, row_tile, rows, k_tiles, S: gl.constexpr, B: gl.constexpr, LS: gl.constexpr):
    """Addresses of scale words [S, B, 1, 8 = g], and the slice's last tile."""
    L3: gl.constexpr = gl.SliceLayout(3, LS)
    s = gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(2, L3)))[:, None, None, None]
    tile = row_tile + gl.arange(0, B, gl.SliceLayout(0, gl.SliceLayout(2, L3)))[None, :, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LS))))[None, None, None, :]
    first = _first_tile(s, k_tiles, S)
    last = gl.maximum(_first_tile(s + 1, k_tiles, S) - first - 1, 0)
    return s_ptr + ((gl.minimum(tile, rows // 16 - 1) * k_tiles + first) * 8 + g), last


@gluon.jit
def _walk(
    x_ptr, w_ptr, s_ptr, row_tile, token, rows, tokens, k, stride_x,
    N: gl.constexpr, B: gl.constexpr, WARPS_N: gl.constexpr, SLICES: gl.constexpr, AHEAD: gl.constexpr,
    BITS: gl.constexpr, SCALES: gl.constexpr, PDL: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Partial sums [SLICES, 16 B, N] of the rows from ``row_tile`` on times the tokens from ``token`` on."""
    S: gl.constexpr = SLICES
    LX: gl.constexpr = token_layout(S, WARPS_N)
    LP: gl.constexpr = pair_layout(S, WARPS_N)
    LH: gl.constexpr = scale_layout(S, WARPS_N)
    LS: gl.constexpr = gl.SliceLayout(4, LH)
    LW: gl.constexpr = gl.BlockedLayout(
        [1, 1, 2, 1, 4, 2], [1, 1, 1, 32, 1, 1], [S, WARPS_N, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0]
    )
    k_tiles = gl.cdiv(k, 64)
    if BITS == 16:
        w_ptrs, w_at, w_end = _row_major(w_ptr, row_tile, rows, k, k_tiles, S, B, LW)
        z = gl.zeros([S, B, 2, 32, 4, 2], gl.int32, LW)
    else:
        w_ptrs, w_end = _fragments(w_ptr, row_tile, rows, k_tiles, S, B, LP, BITS)
        w_at = w_end
        z = gl.zeros([S, B, 32, 4, 2], gl.int32, LP)
    if SCALES == GROUP:
        s_ptrs, s_last = _scale_words(s_ptr, row_tile, rows, k_tiles, S, B, LS)
    else:
        s_ptrs, s_last = w_ptrs, w_end
    walk = (w_ptrs, w_at, w_end, s_ptrs, s_last)
    slice_x = gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(2, LX)))[:, None, None]
    column = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, LX)))[None, None, :]
    n = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, LX)))[None, :, None]
    x_at = _first_tile(slice_x, k_tiles, S) * 64 + column
    # Tokens past the end repeat the last one: every address is valid, and the result is not stored.
    x_ptrs = x_ptr + (gl.minimum(token + n, tokens - 1) * stride_x + x_at)
    x_end = gl.minimum(_first_tile(slice_x + 1, k_tiles, S) * 64, k)
    h = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LS))))[None, None, :, None]
    inputs = (x_ptrs, x_at, x_end)

    batch = _load_batch(walk, 0, AHEAD, BITS, SCALES, True)
    if PDL:
        gdc_wait()
    acc = gl.zeros([S, B * 16, N], gl.float32, mma)
    # A batch of AHEAD tiles is computed while the next is in flight; two batches a turn, for with one the younger
    # would be handed over by a move for every register of it (see moe/small_batch_jit). Every slice has ``whole`` whole
    # tiles, and the loop stops while the batch that it fetches last is among them.
    whole = k // 64 // S
    turns = gl.maximum(whole - AHEAD, 0) // (2 * AHEAD)
    for i in range(turns):
        t = i * (2 * AHEAD)
        later = _load_batch(walk, t + AHEAD, AHEAD, BITS, SCALES, False)
        acc = _batch(acc, batch, inputs, z, h, t, AHEAD, BITS, SCALES, False, mma)
        batch = _load_batch(walk, t + 2 * AHEAD, AHEAD, BITS, SCALES, False)
        acc = _batch(acc, later, inputs, z, h, t + AHEAD, AHEAD, BITS, SCALES, False, mma)
    t = turns * (2 * AHEAD)
    tail = gl.cdiv(k_tiles, S) - t  # 1 to 3 * AHEAD
    later = _load_batch(walk, t + AHEAD, AHEAD, BITS, SCALES, True)
    acc = _batch(acc, batch, inputs, z, h, t, AHEAD, BITS, SCALES, True, mma)
    if tail > AHEAD:
        batch = _load_batch(walk, t + 2 * AHEAD, AHEAD, BITS, SCALES, True)
        acc = _batch(acc, later, inputs, z, h, t + AHEAD, AHEAD, BITS, SCALES, True, mma)
        if tail > 2 * AHEAD:
            acc = _batch(acc, batch, inputs, z, h, t + 2 * AHEAD, AHEAD, BITS, SCALES, True, mma)
    return acc


@gluon.jit
def _sums(acc, channel_ptr, bias_ptr, row, rows, has_bias, BITS: gl.constexpr, SCALES: gl.constexpr):
    """Slices added up, the formats' constants and scales applied, plus bias: float32 [16 B, N]."""
    r = sum_slices(acc, BITS)
    if SCALES == CHANNEL:
        r *= gl.load(channel_ptr + row, mask=row < rows, other=0.0)[:, None]
    bias = gl.load(bias_ptr + row, mask=(row < rows) & (has_bias != 0), other=0.0)
    return r + bias.to(gl.float32)[:, None]


# Not specialised: a program for one token, or without a bias, would be another kernel than the one that was proved.
@gluon.jit(do_not_specialize=["tokens", "stride_residual", "has_bias", "has_residual"])
def small_batch(
    x_ptr,  # bf16 [tokens, k]
    w_ptr,
    s_ptr,  # GROUP: scale words
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
    acc = _walk(
        x_ptr, w_ptr, s_ptr, row_tile, token, rows, tokens, k, stride_x,
        N, B, WARPS_N, SLICES, AHEAD, BITS, SCALES, PDL, mma,
    )  # fmt: skip
    row = row_tile * 16 + gl.arange(0, B * 16, gl.SliceLayout(1, L2))
    n = token + gl.arange(0, N, gl.SliceLayout(0, L2))
    r = _sums(acc, channel_ptr, bias_ptr, row, rows, has_bias, BITS, SCALES)
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
    acc = _walk(
        x_ptr, w_ptr, s_ptr, row_tile, token, rows, tokens, k, stride_x,
        N, B, WARPS_N, SLICES, AHEAD, BITS, SCALES, PDL, mma,
    )  # fmt: skip
    row = row_tile * 16 + gl.arange(0, B * 16, gl.SliceLayout(1, L2))
    n = token + gl.arange(0, N, LN)
    r = _sums(acc, channel_ptr, bias_ptr, row, rows, has_bias, BITS, SCALES)
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
