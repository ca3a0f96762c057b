"""The walk of dense layers for small batches along K: which weights a warp reads, and what meets which tokens.

Weights are the left operand of ``mma.sync`` m16n8k16 and ``N`` tokens the right one. A warp walks along K over row
tiles of 16 rows; each lane reads its own fragments in 16-byte loads, a batch of ``AHEAD`` tiles of 64 columns while it
computes the batch before. ``SLICES`` warps share a row tile along K.

    BITS  SCALES    weights
    16    NONE      bf16, row-major, read as words of two
    8     CHANNEL   E4M3 in fragments (``kernels/layouts.py``), one float32 scale a row, applied in the epilogue
    8     GROUP     MXFP8 in fragments
    4     GROUP     MXFP4 in fragments
    8     ROW_SCALES  FP8 blocks: MXFP8 with bf16 factors, and one float32 scale a row, applied in the epilogue
    4     ROW_SCALES  NVFP4 in fragments: scales in the weights, and one float32 scale a row, likewise

Everything but the last, partial batches runs without masks. There, addresses stop at the slice's last tile and the
tokens read as zero. (bf16 weights are masked too: they may hold an infinity, and that times zero is NaN.)

Tokens come from memory, or from shared memory (``SHARED``), where ``from_sum_jit`` put the only one.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from microscale.kernels.fragments_jit import scale_activations, token_fragments
from microscale.kernels.small_batch_core_jit import (
    add_products,
    add_tile,
    issue_loads_here,
    lane_scales,
    pair_layout,
    scale_layout,
    token_layout,
    weight_fragments,
    word_pairs,
)

NONE: tl.constexpr = tl.constexpr(0)
CHANNEL: tl.constexpr = tl.constexpr(1)
GROUP: tl.constexpr = tl.constexpr(2)
ROW_SCALES: tl.constexpr = tl.constexpr(3)


@gluon.jit
def load_batch(walk, t, N: gl.constexpr, BITS: gl.constexpr, SCALES: gl.constexpr, MASKED: gl.constexpr):
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
            if SCALES >= GROUP:
                s_at = (gl.minimum(t + u, s_last) if MASKED else t + u) * 8
                s = gl.load(s_ptrs + (s_at * 2 if SCALES == ROW_SCALES and BITS == 4 else s_at))
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
def _load_rows(inputs, t, MASKED: gl.constexpr):
    """Of tokens in memory."""
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
def _load_shared(inputs, t, MASKED: gl.constexpr):
    """Of one token in shared memory, whose last tile is zeros: what a slice reads past its own last one."""
    groups, first, count, places = inputs
    L1: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, places.type.layout))
    at = first + t
    if MASKED:
        at = gl.where(t < count, at, groups.shape[0] // 2 - 1)
    x0, _ = gl.broadcast(groups.index(at * 2).load(L1)[None, None, :], places)
    x1, _ = gl.broadcast(groups.index(at * 2 + 1).load(L1)[None, None, :], places)
    return x0, x1


@gluon.jit
def _load_tokens(inputs, t, MASKED: gl.constexpr, SHARED: gl.constexpr):
    """The tokens' two groups of 32 columns of tile ``t``."""
    if SHARED:
        return _load_shared(inputs, t, MASKED)
    else:
        return _load_rows(inputs, t, MASKED)


@gluon.jit
def _step(
    acc, tile, x, z, h, BITS: gl.constexpr, SCALES: gl.constexpr, SHARED: gl.constexpr, mma: gl.constexpr
):  # fmt: skip
    """``acc`` plus one tile of 64 columns. ``SHARED`` tokens carry ``X_SCALE`` already."""
    LA: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    LB: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    x0, x1 = x
    if BITS != 16 and not SHARED:
        x0 = scale_activations(x0)
        x1 = scale_activations(x1)
    b00, b01 = token_fragments(x0, LB)
    b10, b11 = token_fragments(x1, LB)
    b = (b00, b01, b10, b11)
    if BITS == 16:
        a00, a01 = _bf16_fragments(tile[0], z, LA)
        a10, a11 = _bf16_fragments(tile[1], z, LA)
        return add_products(acc, (a00, a01, a10, a11), b)
    elif SCALES == CHANNEL:
        return add_products(acc, weight_fragments(tile[0], tile[1], z, BITS, LA), b)
    else:
        return add_tile(acc, tile[0], tile[1], b, tile[2], z, h, BITS, SCALES == ROW_SCALES, mma)


@gluon.jit
def _batch(
    acc, tiles, inputs, z, h, t,
    N: gl.constexpr, BITS: gl.constexpr, SCALES: gl.constexpr, MASKED: gl.constexpr, SHARED: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """``acc`` plus the tiles t .. t + N. The tokens of the next tile are fetched while one is computed, and no earlier:
    ptxas would fetch all of the batch's at once, for which there are no registers."""
    x = _load_tokens(inputs, t, MASKED, SHARED)
    for u in gl.static_range(N):
        if u + 1 < N:
            later = _load_tokens(inputs, t + (u + 1), MASKED, SHARED)
            issue_loads_here()
            acc = _step(acc, tiles[u], x, z, h, BITS, SCALES, SHARED, mma)
            x = later
        else:
            acc = _step(acc, tiles[u], x, z, h, BITS, SCALES, SHARED, mma)
    return acc


@gluon.jit
def first_tile(s, k_tiles, S: gl.constexpr):
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
    at = first_tile(s, k_tiles, S) * 32 + lane % 4 * 4 + word
    end = gl.minimum(first_tile(s + 1, k_tiles, S) * 32, k // 2)
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
    first = first_tile(s, k_tiles, S)
    last = gl.maximum(first_tile(s + 1, k_tiles, S) - first - 1, 0)
    at = (gl.minimum(tile, rows // 16 - 1) * k_tiles + first).to(gl.int64)
    return w_ptr + (at * (32 * BITS) + (lane * 4 + word)), last


@gluon.jit
def _scale_words(s_ptr, row_tile, rows, k_tiles, more, S: gl.constexpr, B: gl.constexpr, LS: gl.constexpr):
    """Addresses of scale words [S, B, 1, 8 = g], and the slice's last tile. A row tile has ``more`` than its tiles."""
    L3: gl.constexpr = gl.SliceLayout(3, LS)
    s = gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(2, L3)))[:, None, None, None]
    tile = row_tile + gl.arange(0, B, gl.SliceLayout(0, gl.SliceLayout(2, L3)))[None, :, None, None]
    g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LS))))[None, None, None, :]
    first = first_tile(s, k_tiles, S)
    last = gl.maximum(first_tile(s + 1, k_tiles, S) - first - 1, 0)
    return s_ptr + ((gl.minimum(tile, rows // 16 - 1) * (k_tiles + more) + first) * 8 + g), last


@gluon.jit
def _lane_scale_words(s_ptr, row_tile, rows, k_tiles, S: gl.constexpr, B: gl.constexpr, LP: gl.constexpr):
    """Addresses of NVFP4's scale words [S, B, 32 lanes, 1]; the slice's last tile is that of the weights."""
    L3: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, LP))
    s = gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(2, L3)))[:, None, None, None]
    tile = row_tile + gl.arange(0, B, gl.SliceLayout(0, gl.SliceLayout(2, L3)))[None, :, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, L3)))[None, None, :, None]
    at = gl.minimum(tile, rows // 16 - 1) * (k_tiles + 1) + first_tile(s, k_tiles, S)
    return s_ptr + (at * 16 + lane_scales(lane))


@gluon.jit
def weights_of(
    w_ptr, s_ptr, row_tile, rows, k,
    B: gl.constexpr, WARPS_N: gl.constexpr, SLICES: gl.constexpr, BITS: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """The walk over the weights of the rows from ``row_tile`` on, and the two constants that every tile needs."""
    S: gl.constexpr = SLICES
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
        s_ptrs, s_last = _scale_words(s_ptr, row_tile, rows, k_tiles, 0, S, B, LS)
    elif SCALES == ROW_SCALES and BITS == 8:
        s_ptrs, s_last = _scale_words(word_pairs(s_ptr), row_tile, rows, k_tiles, 1, S, B, LS)
    elif SCALES == ROW_SCALES:
        s_ptrs, s_last = _lane_scale_words(s_ptr, row_tile, rows, k_tiles, S, B, LP), w_end
    else:
        s_ptrs, s_last = w_ptrs, w_end
    h = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LS))))[None, None, :, None]
    return (w_ptrs, w_at, w_end, s_ptrs, s_last), z, h


@gluon.jit
def along_k(
    batch, walk, inputs, z, h, k,
    N: gl.constexpr, B: gl.constexpr, SLICES: gl.constexpr, AHEAD: gl.constexpr,
    BITS: gl.constexpr, SCALES: gl.constexpr, SHARED: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Partial sums [SLICES, 16 B, N]; ``batch`` is the walk's first."""
    S: gl.constexpr = SLICES
    k_tiles = gl.cdiv(k, 64)
    acc = gl.zeros([S, B * 16, N], gl.float32, mma)
    # A batch of AHEAD tiles is computed while the next is in flight; two batches a turn, for with one the younger
    # would be handed over by a move for every register of it (see moe/small_batch_jit). Every slice has ``whole`` whole
    # tiles, and the loop stops while the batch that it fetches last is among them.
    whole = k // 64 // S
    turns = gl.maximum(whole - AHEAD, 0) // (2 * AHEAD)
    for i in range(turns):
        t = i * (2 * AHEAD)
        later = load_batch(walk, t + AHEAD, AHEAD, BITS, SCALES, False)
        acc = _batch(acc, batch, inputs, z, h, t, AHEAD, BITS, SCALES, False, SHARED, mma)
        batch = load_batch(walk, t + 2 * AHEAD, AHEAD, BITS, SCALES, False)
        acc = _batch(acc, later, inputs, z, h, t + AHEAD, AHEAD, BITS, SCALES, False, SHARED, mma)
    t = turns * (2 * AHEAD)
    tail = gl.cdiv(k_tiles, S) - t  # 1 to 3 * AHEAD
    later = load_batch(walk, t + AHEAD, AHEAD, BITS, SCALES, True)
    acc = _batch(acc, batch, inputs, z, h, t, AHEAD, BITS, SCALES, True, SHARED, mma)
    if tail > AHEAD:
        batch = load_batch(walk, t + 2 * AHEAD, AHEAD, BITS, SCALES, True)
        acc = _batch(acc, later, inputs, z, h, t + AHEAD, AHEAD, BITS, SCALES, True, SHARED, mma)
        if tail > 2 * AHEAD:
            acc = _batch(acc, batch, inputs, z, h, t + 2 * AHEAD, AHEAD, BITS, SCALES, True, SHARED, mma)
    return acc


@gluon.jit
def along_k_from_two(
    batch, later, walk, inputs, z, h, k,
    N: gl.constexpr, B: gl.constexpr, SLICES: gl.constexpr, AHEAD: gl.constexpr,
    BITS: gl.constexpr, SCALES: gl.constexpr, SHARED: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """The same sums in the same order, where the walk's first two batches are on their way already."""
    S: gl.constexpr = SLICES
    acc = gl.zeros([S, B * 16, N], gl.float32, mma)
    turns = gl.maximum(k // 64 // S - 2 * AHEAD, 0) // (2 * AHEAD)
    for i in range(turns):
        t = i * (2 * AHEAD)
        acc = _batch(acc, batch, inputs, z, h, t, AHEAD, BITS, SCALES, False, SHARED, mma)
        batch = load_batch(walk, t + 2 * AHEAD, AHEAD, BITS, SCALES, False)
        acc = _batch(acc, later, inputs, z, h, t + AHEAD, AHEAD, BITS, SCALES, False, SHARED, mma)
        later = load_batch(walk, t + 3 * AHEAD, AHEAD, BITS, SCALES, False)
    t = turns * (2 * AHEAD)
    tail = gl.cdiv(gl.cdiv(k, 64), S) - t  # 1 to 4 * AHEAD
    acc = _batch(acc, batch, inputs, z, h, t, AHEAD, BITS, SCALES, True, SHARED, mma)
    if tail > AHEAD:
        batch = load_batch(walk, t + 2 * AHEAD, AHEAD, BITS, SCALES, True)
        acc = _batch(acc, later, inputs, z, h, t + AHEAD, AHEAD, BITS, SCALES, True, SHARED, mma)
        if tail > 2 * AHEAD:
            later = load_batch(walk, t + 3 * AHEAD, AHEAD, BITS, SCALES, True)
            acc = _batch(acc, batch, inputs, z, h, t + 2 * AHEAD, AHEAD, BITS, SCALES, True, SHARED, mma)
            if tail > 3 * AHEAD:
                acc = _batch(acc, later, inputs, z, h, t + 3 * AHEAD, AHEAD, BITS, SCALES, True, SHARED, mma)
    return acc


@gluon.jit
def walk_along_k(
    x_ptr, w_ptr, s_ptr, row_tile, token, rows, tokens, k, stride_x,
    N: gl.constexpr, B: gl.constexpr, WARPS_N: gl.constexpr, SLICES: gl.constexpr, AHEAD: gl.constexpr,
    BITS: gl.constexpr, SCALES: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Partial sums [SLICES, 16 B, N] of the rows from ``row_tile`` on times the tokens from ``token`` on."""
    S: gl.constexpr = SLICES
    LX: gl.constexpr = token_layout(S, WARPS_N)
    k_tiles = gl.cdiv(k, 64)
    walk, z, h = weights_of(w_ptr, s_ptr, row_tile, rows, k, B, WARPS_N, S, BITS, SCALES)
    slice_x = gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(2, LX)))[:, None, None]
    column = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, LX)))[None, None, :]
    n = gl.arange(0, N, gl.SliceLayout(0, gl.SliceLayout(2, LX)))[None, :, None]
    x_at = first_tile(slice_x, k_tiles, S) * 64 + column
    # Tokens past the end repeat the last one: every address is valid, and the result is not stored.
    x_ptrs = x_ptr + (gl.minimum(token + n, tokens - 1) * stride_x + x_at)
    x_end = gl.minimum(first_tile(slice_x + 1, k_tiles, S) * 64, k)
    inputs = (x_ptrs, x_at, x_end)

    batch = load_batch(walk, 0, AHEAD, BITS, SCALES, True)
    if EARLY:
        later = load_batch(walk, AHEAD, AHEAD, BITS, SCALES, True)
    if PDL:
        gdc_wait()
    if EARLY:
        return along_k_from_two(batch, later, walk, inputs, z, h, k, N, B, S, AHEAD, BITS, SCALES, False, mma)
    else:
        return along_k(batch, walk, inputs, z, h, k, N, B, S, AHEAD, BITS, SCALES, False, mma)
