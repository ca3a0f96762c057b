"""Jit code of a dense layer behind the residual stream, for one token: sum, RMSNorm and product in one launch.

Every program adds and norms the token again, which costs less than a launch. It does so as ``small/norm_jit.rms_norm``
does, so that nobody can tell from the bits: the square of each column is added to its neighbours' in the same order. A
thread there has 8 columns side by side, of every ``256 * NORM_WARPS`` in a row; lanes are added next, warps last. Here
a program has fewer warps, so each stands for several of those: ``HIGH`` of them.

The normed token goes to shared memory, from where the walk along K reads it. The first program stores the sum.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from microscale.kernels.dense.small_batch_jit import load_rows, sums_of
from microscale.kernels.dense.walk_jit import along_k, along_k_from_two, first_tile, load_batch, weights_of
from microscale.kernels.fragments_jit import scale_activations
from microscale.kernels.gluon_names import reinterpret
from microscale.kernels.small_batch_core_jit import issue_loads_here, token_layout


@gluon.constexpr_function
def _column_layout(warps):
    """Columns [warps, 32 lanes, 8]: 16 bytes a lane."""
    return gl.BlockedLayout([1, 1, 8], [1, 32, 1], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def _load_chunks(ptr, column, k, CHUNKS: gl.constexpr):
    """Columns of a row by chunks, one of each warp; only the last may be short, and is zero from ``k`` on."""
    STEP: gl.constexpr = column.shape[0] * 256
    found = ()
    for c in gl.static_range(CHUNKS):
        if c + 1 < CHUNKS:
            found = found + (gl.load(ptr + c * STEP + column),)
        else:
            found = found + (gl.load(ptr + c * STEP + column, mask=column < k - c * STEP, other=0.0),)
    return found


@gluon.jit
def _added(parts, n: gl.constexpr):
    """The sum of ``n`` parts, as a butterfly of lanes adds them: far ones first."""
    if n == 1:
        return parts[0]
    else:
        found = ()
        for i in gl.static_range(n // 2):
            found = found + (parts[i] + parts[i + n // 2],)
        return _added(found, n // 2)


@gluon.jit
def _added_registers(parts):
    """The same of [n] in every thread's registers."""
    n: gl.constexpr = parts.shape[0]
    if n == 1:
        return gl.sum(parts, axis=0)
    else:
        return _added_registers(gl.sum(parts.reshape([2, n // 2]), axis=0))


@gluon.jit
def _side_by_side(parts, n: gl.constexpr):
    """``n`` parts of one length, one after the other."""
    if n == 1:
        return parts[0]
    else:
        LENGTH: gl.constexpr = parts[0].shape[0]
        found = ()
        for i in gl.static_range(n // 2):
            pair = gl.join(parts[2 * i], parts[2 * i + 1])
            found = found + (pair.permute([1, 0]).reshape([2 * LENGTH]),)
        return _side_by_side(found, n // 2)


@gluon.jit
def _sum_of_squares(of_warps, chunks, CHUNKS: gl.constexpr, HIGH: gl.constexpr, WARPS: gl.constexpr):
    """Of a whole row of float32, in the order of ``rms_norm``. ``of_warps``: shared memory for the warps' sums."""
    HELD: gl.constexpr = of_warps.shape[0]
    LW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, _column_layout(WARPS)))
    L16: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    parts = ()
    for high in gl.static_range(HIGH):
        if high + HIGH < CHUNKS:
            both = gl.join(chunks[high], chunks[high + HIGH]).permute([0, 1, 3, 2]).reshape([HELD, 32, 16])
            both = gl.convert_layout(both, L16, assert_trivial=True)
            part = gl.sum(gl.sum(both * both, axis=2), axis=1)
            parts = parts + (gl.convert_layout(part, LW, assert_trivial=True),)
        elif high < CHUNKS:
            parts = parts + (gl.sum(gl.sum(chunks[high] * chunks[high], axis=2), axis=1),)
        else:
            parts = parts + (gl.zeros([HELD], gl.float32, LW),)
    # Every thread adds the warps up by itself: a reduction of Triton's is two barriers.
    of_warps.store(_added(parts, HIGH))
    return _added_registers(of_warps.load(gl.BlockedLayout([HELD], [32], [WARPS], [0])))


@gluon.jit
def _slice_of_this_warp(WARPS_N: gl.constexpr):
    """Each warp has its own: for places in shared memory only, where a tensor of all slices would want one address."""
    thread = gl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)
    return thread // (32 * WARPS_N)


@gluon.jit
def _load_token(
    x_ptr, residual_ptr, weight_ptr, k,
    WARPS: gl.constexpr, CHUNKS: gl.constexpr, HELD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The token's columns, and in chunks what is added, residual and weight of the norm, which is there before."""
    LC: gl.constexpr = _column_layout(WARPS)
    warp = gl.arange(0, HELD, gl.SliceLayout(1, gl.SliceLayout(2, LC)))[:, None, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, LC)))[None, :, None]
    place = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, LC)))[None, None, :]
    column = warp * 256 + lane * 8 + place
    weights = _load_chunks(weight_ptr, column, k, CHUNKS)
    if PDL:
        gdc_wait()
    added = _load_chunks(x_ptr, column, k, CHUNKS)
    residual = _load_chunks(residual_ptr, column, k, CHUNKS)
    issue_loads_here()
    return column, added, residual, weights


@gluon.jit
def _normed_token(
    loaded, sum_ptr, epsilon, k,
    N: gl.constexpr, WARPS_N: gl.constexpr, SLICES: gl.constexpr, BITS: gl.constexpr,
    CHUNKS: gl.constexpr, BLOCKS: gl.constexpr, HELD: gl.constexpr, HIGH: gl.constexpr,
):  # fmt: skip
    """``norm(x + residual) * weight`` in shared memory, as ``along_k`` takes it; the sum is stored."""
    WARPS: gl.constexpr = SLICES * WARPS_N
    STEP: gl.constexpr = 256 * HELD
    LX: gl.constexpr = token_layout(SLICES, WARPS_N)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    column, added, residual, weights = loaded
    sums = ()
    for c in gl.static_range(CHUNKS):
        total = (added[c].to(gl.float32) + residual[c].to(gl.float32)).to(gl.bfloat16)
        gl.store(sum_ptr + c * STEP + column, total, mask=(column < k - c * STEP) & (gl.program_id(1) == 0))
        sums = sums + (total.to(gl.float32),)
    # Both before the first is read: in one's place the other would wait for a barrier more.
    of_warps = gl.allocate_shared_memory(gl.float32, [HELD], FLAT)
    token = gl.allocate_shared_memory(gl.bfloat16, [BLOCKS * STEP], FLAT)
    factor = gl.rsqrt(_sum_of_squares(of_warps, sums, CHUNKS, HIGH, WARPS) / k + epsilon)
    normed = ()
    for c in gl.static_range(BLOCKS):
        if c < CHUNKS:
            y = (sums[c] * factor * weights[c].to(gl.float32)).to(gl.bfloat16)
            if BITS != 16:
                y = scale_activations(y)
        else:
            y = gl.zeros([HELD, 32, 8], gl.bfloat16, _column_layout(WARPS))
        normed = normed + (y.reshape([STEP]),)
    token.store(_side_by_side(normed, BLOCKS))
    tl.debug_barrier()  # here, and not where the loop along K first reads
    groups = reinterpret(token, gl.bfloat16, [BLOCKS * STEP // 32, 32], FLAT)
    s = _slice_of_this_warp(WARPS_N)
    k_tiles = gl.cdiv(k, 64)
    first = first_tile(s, k_tiles, SLICES)
    return groups, first, first_tile(s + 1, k_tiles, SLICES) - first, gl.zeros([SLICES, N, 32], gl.bfloat16, LX)


@gluon.jit(do_not_specialize=["has_bias"])
def small_batch_from_sum(
    x_ptr,  # bf16 [k]: what is added to the residual stream
    residual_ptr,  # bf16 [k]
    norm_ptr,  # bf16 [k]: weight of the norm
    w_ptr,
    s_ptr,  # GROUP, ROW_SCALES: scale words
    channel_ptr,  # CHANNEL: float32 [rows]
    bias_ptr,  # bf16 [rows]
    sum_ptr,  # bf16 [k]
    y_ptr,  # bf16 [rows]
    epsilon,
    rows,
    k,
    has_bias,
    BITS: gl.constexpr,
    SCALES: gl.constexpr,
    N: gl.constexpr,
    B: gl.constexpr,
    WARPS_N: gl.constexpr,
    SLICES: gl.constexpr,
    AHEAD: gl.constexpr,
    CHUNKS: gl.constexpr,
    BLOCKS: gl.constexpr,
    HELD: gl.constexpr,
    HIGH: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
):
    """``sum = x + residual; y = norm(sum) * norm_weight @ weight.T + bias``. Grid: (1, blocks of 16 B rows)."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SLICES, WARPS_N, 1], [1, 16, 8])
    L2: gl.constexpr = gl.SliceLayout(0, mma)
    if PDL:
        gdc_launch_dependents()
    row_tile = gl.program_id(1) * B
    walk, z, h = weights_of(w_ptr, s_ptr, row_tile, rows, k, B, WARPS_N, SLICES, BITS, SCALES)
    row = row_tile * 16 + gl.arange(0, B * 16, gl.SliceLayout(1, L2))
    of_rows = load_rows(s_ptr, channel_ptr, bias_ptr, row, rows, k, has_bias, SCALES)
    batch = load_batch(walk, 0, AHEAD, BITS, SCALES, True)
    loaded = _load_token(x_ptr, residual_ptr, norm_ptr, k, SLICES * WARPS_N, CHUNKS, HELD, PDL)
    if EARLY:
        later = load_batch(walk, AHEAD, AHEAD, BITS, SCALES, True)
    token = _normed_token(loaded, sum_ptr, epsilon, k, N, WARPS_N, SLICES, BITS, CHUNKS, BLOCKS, HELD, HIGH)
    if EARLY:
        acc = along_k_from_two(batch, later, walk, token, z, h, k, N, B, SLICES, AHEAD, BITS, SCALES, True, mma)
    else:
        acc = along_k(batch, walk, token, z, h, k, N, B, SLICES, AHEAD, BITS, SCALES, True, mma)
    n = gl.arange(0, N, gl.SliceLayout(0, L2))
    r = sums_of(acc, of_rows, BITS, SCALES)
    gl.store(y_ptr + row[:, None] + n[None, :], r.to(gl.bfloat16), mask=(row < rows)[:, None] & (n == 0)[None, :])
