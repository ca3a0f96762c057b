"""Jit code of the grouped expert GEMMs for crowded experts on ``wgmma``: one resident program an SM, ``GROUPS`` warp
groups that multiply and one that loads.

A work item is 64 * GROUPS weight rows times one tile of the work list; each multiplying group owns 64 of the rows, all
read the same tokens. K tiles travel through a ring of ``STAGES``, with two mbarriers a stage: ``full`` when the loading
group's 128 threads have copied, ``empty`` when all the others have read. No barrier spans the program: a group
converts weights while its last product, or another group's, is in the matrix unit, and the loading group is in the next
item while this one ends.

What passes L2 decides the shape. A K tile is 2 KB of MXFP4 for each group, 4 KB of MXFP8, and 128 bytes for each token
(64 in E4M3) whatever the number of groups:

    many tokens    256 columns take a weight from L2 and convert it half as often as 128; two groups have the registers
    32 to 128      three groups read a token once for 192 rows, and there are more warps to hide latencies

A second product beside the first, from the same operand, would give an expert with 70 pairs 80 columns. ptxas
serialises all products then, whatever the width (C7512).

MXFP4, NVFP4 or MXFP8 weights; with the latter two, bf16 tokens. Operands, the order of columns, and how results are
stored: ``grouped_wgmma_jit``.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from microscale.kernels.gluon_names import reinterpret
from microscale.kernels.moe.grouped_wgmma_jit import down_layout, row_values, store_down, store_gate_up
from microscale.kernels.moe.resident_load_jit import (
    WIDTHS,
    await_tile,
    entry_of,
    fits,
    load_items,
    part_of,
    release,
)
from microscale.kernels.moe.wgmma_operands_jit import convert, convert_mxfp8, operand, operand_mxfp8, row_peaks


@gluon.constexpr_function
def product_layout(COLUMNS, FP8):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32 if FP8 else 16])


# ---- a multiplying group --------------------------------------------------------------------------------------------


@gluon.jit
def _product(
    acc, x_ring, w_ring, s_ring, empty, peaks, step, RELEASE: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, BITS: gl.constexpr, L4: gl.constexpr, LA: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Queue a K tile that has come; wait for the one before and give its place back."""
    stage = step % STAGES
    at = stage * GROUPS + GROUP
    scales = s_ring.index(stage * (s_ring.shape[0] // STAGES) + GROUP)
    if BITS == 8:
        a = operand_mxfp8(convert_mxfp8(w_ring.index(2 * at), w_ring.index(2 * at + 1), scales, L4), 64, L4, LA)
    else:
        a = operand(convert(w_ring.index(at), scales, peaks, L4, FP8), 64, L4, LA, FP8)
    x = x_ring.index(stage * (x_ring.shape[0] // STAGES)).permute((1, 0))
    acc = warpgroup_mma(a, x, acc, is_async=True)
    if RELEASE:
        acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
        release(empty, step - 1, STAGES)
    return acc


@gluon.jit
def _finish(
    acc, bias, row_scale, columns, pairs, out_ptr, block, first, count,
    ROW_TILES: gl.constexpr, BEGIN: gl.constexpr, COLUMNS: gl.constexpr, NVFP4: gl.constexpr, FP8: gl.constexpr,
    FIRST: gl.constexpr, HAS_BIAS: gl.constexpr, GATE: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    H_SCALE: gl.constexpr, OUT_STRIDE: gl.constexpr,
):  # fmt: skip
    """What becomes of columns ``BEGIN`` and on, 64 at a time: all at once would take more registers than there are."""
    if COLUMNS > 64:
        HALF: gl.constexpr = COLUMNS // 2
        mma: gl.constexpr = product_layout(HALF, FP8)
        low, high = gl.split(acc.reshape([64, 2, HALF]).permute([0, 2, 1]))
        _finish(
            gl.convert_layout(low, mma, assert_trivial=True), bias, row_scale, columns, pairs, out_ptr, block, first,
            count, ROW_TILES, BEGIN, HALF, NVFP4, FP8, FIRST, HAS_BIAS, GATE, ALPHA, LIMIT, H_SCALE, OUT_STRIDE,
        )  # fmt: skip
        if count > BEGIN + HALF:
            _finish(
                gl.convert_layout(high, mma, assert_trivial=True), bias, row_scale, columns, pairs, out_ptr, block,
                first, count, ROW_TILES, BEGIN + HALF, HALF,
                NVFP4, FP8, FIRST, HAS_BIAS, GATE, ALPHA, LIMIT, H_SCALE, OUT_STRIDE,
            )  # fmt: skip
    else:
        mma: gl.constexpr = product_layout(COLUMNS, FP8)
        LR: gl.constexpr = gl.SliceLayout(1, mma)
        LC: gl.constexpr = gl.SliceLayout(0, mma)
        if FP8:
            acc = acc * gl.convert_layout(row_scale, LR, assert_trivial=True)[:, None]
            acc = acc * (columns.slice(BEGIN, COLUMNS).load(LC)[None, :] if FIRST else 1.0 / H_SCALE)
        if NVFP4:
            acc = acc * gl.convert_layout(row_scale, LR, assert_trivial=True)[:, None]
        if HAS_BIAS:
            acc += gl.convert_layout(bias, LR, assert_trivial=True)[:, None]
        if FIRST:
            store_gate_up(
                acc, out_ptr, block, first + BEGIN, count - BEGIN,
                ROW_TILES, 64, COLUMNS, 4, GATE, ALPHA, LIMIT, OUT_STRIDE, H_SCALE, FP8,
            )  # fmt: skip
        else:
            y = acc * columns.slice(BEGIN, COLUMNS).load(LC)[None, :]
            pair = pairs.slice(BEGIN, COLUMNS).load(gl.SliceLayout(0, down_layout(64, 4)))
            store_down(y, out_ptr, pair, block, count - BEGIN, ROW_TILES, 64, COLUMNS, 4)


@gluon.jit
def _multiply_tile(
    factors_ptr, peaks_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, x_smem, w_ring, s_ring, columns, pairs, full,
    empty, expert, block, first, count, step,
    KT: gl.constexpr, ROW_TILES: gl.constexpr, TOP_K: gl.constexpr, GROUPS: gl.constexpr, BN: gl.constexpr,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, BITS: gl.constexpr, NVFP4: gl.constexpr,
    FP8: gl.constexpr, FIRST: gl.constexpr, HAS_BIAS: gl.constexpr, GATE: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, H_SCALE: gl.constexpr, OUT_STRIDE: gl.constexpr,
):  # fmt: skip
    """One group's part of an item: row block ``block`` of 64."""
    mma: gl.constexpr = product_layout(COLUMNS, FP8)
    LA: gl.constexpr = gl.DotOperandLayout(0, mma, 4 if FP8 else 2)
    L4: gl.constexpr = gl.BlockedLayout([1, 1, 4, 4 if FP8 else 2], [8, 4, 1, 1], [4, 1, 1, 1], [3, 2, 1, 0])
    x_ring = part_of(x_smem, BN, COLUMNS, STAGES)
    rg = gl.arange(0, 32, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L4))))
    tile = gl.minimum(block * 4 + rg // 8, ROW_TILES - 1)
    peaks = row_peaks(peaks_ptr, expert * (ROW_TILES * 8) + tile * 8 + rg % 8, L4, FP8)
    # What the end needs, asked for now: there all groups would wait for it, four times.
    bias, row_scale = row_values(bias_ptr, peaks_ptr, expert, block, KT, ROW_TILES, 64, HAS_BIAS, NVFP4, FP8, mma)
    if FP8 or not FIRST:
        n = gl.arange(0, COLUMNS, gl.BlockedLayout([1], [32], [4], [0]))
        pair = gl.load(order_ptr + first + gl.minimum(n, count - 1))
        column = gl.load(factors_ptr + pair // TOP_K) if FIRST else gl.load(weights_ptr + pair)
    acc = warpgroup_mma_init(gl.zeros([64, COLUMNS], gl.float32, mma))
    # Two tiles a turn: the operand in flight and the next one have registers of their own, and one fence serves both.
    # One or two tiles before the loop, none after it: there ptxas would find no registers free of a wgmma in flight,
    # and serialise (C7513).
    AHEAD: gl.constexpr = 2 - KT % 2
    for i in gl.static_range(AHEAD):
        await_tile(full, step + i, STAGES)
    fence_async_shared()
    for i in gl.static_range(AHEAD):
        acc = _product(
            acc, x_ring, w_ring, s_ring, empty, peaks, step + i, i > 0, GROUPS, GROUP, STAGES, BITS, L4, LA, FP8
        )
    for i in range((KT - AHEAD) // 2):
        now = step + AHEAD + 2 * i
        await_tile(full, now, STAGES)
        await_tile(full, now + 1, STAGES)
        fence_async_shared()
        for j in gl.static_range(2):
            acc = _product(
                acc, x_ring, w_ring, s_ring, empty, peaks, now + j, True, GROUPS, GROUP, STAGES, BITS, L4, LA, FP8
            )
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release(empty, step + KT - 1, STAGES)
    if FP8 or not FIRST:
        columns.index(GROUP).slice(0, COLUMNS).store(column)
        if not FIRST:
            pairs.index(GROUP).slice(0, COLUMNS).store(pair)
    _finish(
        acc, bias, row_scale, columns.index(GROUP), pairs.index(GROUP), out_ptr, block, first, count,
        ROW_TILES, 0, COLUMNS, NVFP4, FP8, FIRST, HAS_BIAS, GATE, ALPHA, LIMIT, H_SCALE, OUT_STRIDE,
    )  # fmt: skip


@gluon.jit
def _multiply(
    factors_ptr, peaks_ptr, bias_ptr, out_ptr, tiles_ptr, order_ptr, weights_ptr, items,
    x_smem, w_ring, s_ring, columns, pairs, full, empty, GROUP: gl.constexpr,
    KT: gl.constexpr, ROW_TILES: gl.constexpr, TOP_K: gl.constexpr, GROUPS: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, BITS: gl.constexpr, NVFP4: gl.constexpr, FP8: gl.constexpr, FIRST: gl.constexpr,
    HAS_BIAS: gl.constexpr, GATE: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, H_SCALE: gl.constexpr,
    OUT_STRIDE: gl.constexpr,
):  # fmt: skip
    """Rows ``64 * GROUP`` to ``64 * GROUP + 63`` of every item."""
    BLOCKS: gl.constexpr = (ROW_TILES + 4 * GROUPS - 1) // (4 * GROUPS)
    LAST: gl.constexpr = (BLOCKS - 1) * GROUPS + GROUP
    IDLE: gl.constexpr = LAST >= (ROW_TILES + 3) // 4  # in the last block of rows
    step = 0
    expert, first, count = entry_of(tiles_ptr, gl.program_id(0), items, BLOCKS)
    for item in tl.range(gl.program_id(0), items, gl.num_programs(0), disable_licm=True):
        later = entry_of(tiles_ptr, item + gl.num_programs(0), items, BLOCKS)
        block = item % BLOCKS * GROUPS + GROUP
        if IDLE:
            if (count > 0) & (block == LAST):
                for kt in range(KT):
                    await_tile(full, step + kt, STAGES)
                    release(empty, step + kt, STAGES)
                step += KT
                count = 0
        for narrower in gl.static_range(WIDTHS):
            if fits(count, BN, narrower):
                _multiply_tile(
                    factors_ptr, peaks_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, x_smem, w_ring, s_ring, columns,
                    pairs, full, empty, expert, block, first, count, step, KT, ROW_TILES, TOP_K, GROUPS, BN,
                    BN >> narrower, STAGES, GROUP, BITS, NVFP4, FP8, FIRST, HAS_BIAS, GATE, ALPHA, LIMIT, H_SCALE,
                    OUT_STRIDE,
                )  # fmt: skip
                step += KT
        expert, first, count = later


# ---- the kernel -----------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["items"])
def grouped_gemm_resident(
    x_ptr,  # these as in grouped_wgmma_jit.grouped_gemm
    factors_ptr,
    w_ptr,
    s_ptr,
    peaks_ptr,
    bias_ptr,
    out_ptr,
    tiles_ptr,
    order_ptr,
    weights_ptr,
    items,  # entries of the work list times blocks of 64 * GROUPS rows
    KT: gl.constexpr,
    ROW_TILES: gl.constexpr,
    TOP_K: gl.constexpr,
    GROUPS: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
    BITS: gl.constexpr,
    NVFP4: gl.constexpr,
    FP8: gl.constexpr,
    FIRST: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATE: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    H_SCALE: gl.constexpr,
    OUT_STRIDE: gl.constexpr,
    PDL: gl.constexpr,
):
    """One of the two GEMMs of the layer. An entry's items are neighbours: its tokens, and the weights of an expert with
    several entries, come from L2."""
    LX: gl.constexpr = gl.NVMMASharedLayout(64, 8, rank=2) if FP8 else gl.NVMMASharedLayout(128, 16, rank=2)
    LW: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [2, 1, 0])
    LS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [0])
    LV: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # Powers of two: with three groups the scales of a fourth are copied too, and nobody reads them.
    SCALED: gl.constexpr = 2 if GROUPS == 2 else 4
    x_smem = gl.allocate_shared_memory(gl.float8e4nv if FP8 else gl.bfloat16, [STAGES, BN, 64], LX)
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES * GROUPS * (BITS // 4), 32, 4, 4], LW)
    WORDS: gl.constexpr = 64 if NVFP4 else 32
    s_smem = gl.allocate_shared_memory(gl.int32, [STAGES, SCALED * WORDS], LS)
    s_ring = reinterpret(s_smem, gl.int32, [STAGES * SCALED, WORDS], LS)
    columns = gl.allocate_shared_memory(gl.float32, [GROUPS, BN], LV)
    pairs = gl.allocate_shared_memory(gl.int32, [GROUPS, BN], LV)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(empty.index(i), count=128 * GROUPS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # Written out: a list that is put together loses which of its numbers are constants.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        factors_ptr, peaks_ptr, bias_ptr, out_ptr, tiles_ptr, order_ptr, weights_ptr, items,
                        x_smem, w_ring, s_ring, columns, pairs, full, empty, 0, KT, ROW_TILES, TOP_K, GROUPS, BN,
                        STAGES, BITS, NVFP4, FP8, FIRST, HAS_BIAS, GATE, ALPHA, LIMIT, H_SCALE, OUT_STRIDE,
                    ),
                ),
                (
                    _multiply,
                    (
                        factors_ptr, peaks_ptr, bias_ptr, out_ptr, tiles_ptr, order_ptr, weights_ptr, items,
                        x_smem, w_ring, s_ring, columns, pairs, full, empty, 1, KT, ROW_TILES, TOP_K, GROUPS, BN,
                        STAGES, BITS, NVFP4, FP8, FIRST, HAS_BIAS, GATE, ALPHA, LIMIT, H_SCALE, OUT_STRIDE,
                    ),
                ),
                (
                    load_items,
                    (
                        x_ptr, w_ptr, s_ptr, tiles_ptr, order_ptr, items, x_smem, w_ring, s_smem, full, empty,
                        KT, ROW_TILES, TOP_K, GROUPS, BN, STAGES, BITS, NVFP4, FP8, FIRST,
                    ),
                ),
            ],
            [4, 4],
            [REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        factors_ptr, peaks_ptr, bias_ptr, out_ptr, tiles_ptr, order_ptr, weights_ptr, items,
                        x_smem, w_ring, s_ring, columns, pairs, full, empty, 0, KT, ROW_TILES, TOP_K, GROUPS, BN,
                        STAGES, BITS, NVFP4, FP8, FIRST, HAS_BIAS, GATE, ALPHA, LIMIT, H_SCALE, OUT_STRIDE,
                    ),
                ),
                (
                    _multiply,
                    (
                        factors_ptr, peaks_ptr, bias_ptr, out_ptr, tiles_ptr, order_ptr, weights_ptr, items,
                        x_smem, w_ring, s_ring, columns, pairs, full, empty, 1, KT, ROW_TILES, TOP_K, GROUPS, BN,
                        STAGES, BITS, NVFP4, FP8, FIRST, HAS_BIAS, GATE, ALPHA, LIMIT, H_SCALE, OUT_STRIDE,
                    ),
                ),
                (
                    _multiply,
                    (
                        factors_ptr, peaks_ptr, bias_ptr, out_ptr, tiles_ptr, order_ptr, weights_ptr, items,
                        x_smem, w_ring, s_ring, columns, pairs, full, empty, 2, KT, ROW_TILES, TOP_K, GROUPS, BN,
                        STAGES, BITS, NVFP4, FP8, FIRST, HAS_BIAS, GATE, ALPHA, LIMIT, H_SCALE, OUT_STRIDE,
                    ),
                ),
                (
                    load_items,
                    (
                        x_ptr, w_ptr, s_ptr, tiles_ptr, order_ptr, items, x_smem, w_ring, s_smem, full, empty,
                        KT, ROW_TILES, TOP_K, GROUPS, BN, STAGES, BITS, NVFP4, FP8, FIRST,
                    ),
                ),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
