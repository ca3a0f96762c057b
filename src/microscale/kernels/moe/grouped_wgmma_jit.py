"""Jit code of the grouped expert GEMMs for large batches on ``wgmma``: packed weights → registers → matrix unit.

A program owns ``BM`` weight rows and one tile of the work list, up to ``BN`` tokens. Weights are the left operand and
come from registers (``wgmma_operands_jit``), so shared memory carries them as 4-bit codes. Tokens are the right
operand, from shared memory. Words, scales and tokens of a K tile arrive through a ring of ``STAGES`` filled by
``cp.async``.

Tokens are prepared: within each 32 their columns stand in the order in which the fragments meet them, and they are
filled up to a multiple of 64. ``prepare_*`` writes the layer's input so, and the first GEMM its output.

    bf16    column 8 t + 4 j + 2 c + p at 16 j + 8 c + 2 t + p, times 2**64
    E4M3    column 8 t + 4 a + 2 b + p at 16 p + 4 t + 2 a + (1 - b), times a power of two: each token of the input has
            its own, so that its largest number lies between 128 and 256; the gate's output, which the clamp bounds, has
            one for all (``H_SCALE``)

Programs of one expert run side by side, token tiles fastest: a block of weight rows is read from memory once and from
L2 by the expert's other token tiles.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy as cp
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from microscale.kernels.fragments_jit import X_SCALE
from microscale.kernels.gate_jit import gated
from microscale.kernels.gluon_names import async_load
from microscale.kernels.moe.pairs_jit import fragment_columns
from microscale.kernels.moe.wgmma_operands_jit import convert, operand, row_factor, row_peaks
from microscale.kernels.mxfp8_jit import round_e4m3
from microscale.kernels.small_batch_core_jit import row_scales


@triton.jit
def prepare_tokens(
    x_ptr,  # bf16 [tokens, width]
    out_ptr,  # bf16 [tokens, PADDED], interleaved, times 2**64
    width,
    stride_x,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token in bf16: in fragment order, times 2**64, zeros up to ``PADDED``."""
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = fragment_columns(at)
    token = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + token * stride_x + column, mask=column < width, other=0.0)
    tl.store(out_ptr + token * PADDED + at, (x.to(tl.float32) * X_SCALE).to(tl.bfloat16), mask=at < PADDED)


@triton.jit
def prepare_tokens_fp8(
    x_ptr,  # bf16 [tokens, width]
    out_ptr,  # uint8 [tokens, PADDED]: E4M3 in fragment order
    factors_ptr,  # float32 [tokens]: a token is its codes times its factor
    width,
    stride_x,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """One token in E4M3. A NaN or an infinity in it makes its factor NaN: a fault upstream must show."""
    at = tl.arange(0, BLOCK)
    column = at // 32 * 32 + at // 4 % 4 * 8 + at // 2 % 2 * 4 + (1 - at % 2) * 2 + at // 16 % 2
    token = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + token * stride_x + column, mask=column < width, other=0.0)
    # bf16 is the upper half of float32; so written, the interpreter gets subnormals right too.
    x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    exponents = (x.to(tl.uint32, bitcast=True) >> 23).to(tl.int32) & 0xFF
    largest = tl.max(exponents, axis=0)
    scale = tl.minimum(261 - largest, 253)  # a largest exponent of 127, 1.0 to 2.0, wants 2**7
    codes = round_e4m3(x * (scale << 23).to(tl.float32, bitcast=True), PLAIN)
    tl.store(out_ptr + token * PADDED + at, codes, mask=at < PADDED)
    bits = tl.where(largest == 255, 0x7FC00000, (254 - scale) << 23)
    tl.store(factors_ptr + token, bits.to(tl.float32, bitcast=True))


@gluon.jit
def _issue(
    x_ptrs, real, w_ptrs, s_ptrs, x_smem, w_smem, s_smem, kt,
    KT: gl.constexpr, STAGES: gl.constexpr, NVFP4: gl.constexpr,
):  # fmt: skip
    """Ask for K tile ``kt``. Columns without a token are filled with zeros and read nothing from L2, which limits a
    batch."""
    if kt < KT:
        stage = kt % STAGES
        async_load(x_smem.index(stage), x_ptrs + kt * 64, real)
        async_load(w_smem.index(stage), w_ptrs + kt * 128)
        async_load(s_smem.index(stage), s_ptrs + kt * (16 if NVFP4 else 8))
    cp.commit_group()


@gluon.jit
def _product(
    x_ptr, rows, count, w_ptr, s_ptr, peaks_ptr, expert, block, x_smem, w_smem, s_smem,
    KT: gl.constexpr, ROW_TILES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, OVERLAP: gl.constexpr, NVFP4: gl.constexpr, FP8: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """float32 [BM, BN]: row block ``block`` of an expert times the tokens ``rows [BN]``; ``count`` of them are real."""
    # A lane's words [8 R, 4 = t, 4 = v], and the numbers of one register along the fourth axis.
    LA: gl.constexpr = gl.DotOperandLayout(0, mma, 4 if FP8 else 2)
    L4: gl.constexpr = gl.BlockedLayout([1, 1, 4, 4 if FP8 else 2], [8, 4, 1, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    LQ: gl.constexpr = gl.SliceLayout(3, L4)
    LX: gl.constexpr = gl.BlockedLayout([1, 16 if FP8 else 8], [8 if FP8 else 4, 4 if FP8 else 8], [WARPS, 1], [1, 0])
    LC: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    column = gl.arange(0, 64, gl.SliceLayout(0, LX))
    x_ptrs = x_ptr + gl.convert_layout(rows, gl.SliceLayout(1, LX)).to(gl.int64)[:, None] * (KT * 64) + column[None, :]
    real = (gl.arange(0, BN, gl.SliceLayout(1, LX)) < count)[:, None]
    rg = gl.arange(0, BM // 2, gl.SliceLayout(1, gl.SliceLayout(2, LQ)))
    t = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, LQ)))
    v = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LQ)))
    # Row tiles past the end repeat the last one: every address is valid, and the result is not stored.
    tile = gl.minimum(block * (BM // 16) + rg // 8, ROW_TILES - 1)
    at = (tile * (KT * 128) + rg % 8 * 16)[:, None, None] + t[None, :, None] * 4 + v[None, None, :]
    w_ptrs = w_ptr + expert.to(gl.int64) * (ROW_TILES * KT * 128) + at
    if NVFP4:
        rs = gl.arange(0, BM, LC)
        s_tile = gl.minimum(block * (BM // 16) + rs // 16, ROW_TILES - 1)
        s_ptrs = s_ptr + expert.to(gl.int64) * (ROW_TILES * (KT + 1) * 16) + (s_tile * ((KT + 1) * 16) + rs % 16)
    else:
        rs = gl.arange(0, BM // 2, LC)
        s_tile = gl.minimum(block * (BM // 16) + rs // 8, ROW_TILES - 1)
        s_ptrs = s_ptr + expert.to(gl.int64) * (ROW_TILES * KT * 8) + (s_tile * (KT * 8) + rs % 8)
    peaks = row_peaks(peaks_ptr, expert * (ROW_TILES * 8) + tile * 8 + rg % 8, L4, FP8)

    acc = gl.zeros([BM, BN], gl.float32, mma)
    if OVERLAP:
        # Two tiles a turn, so that the operand in flight and the next one have registers of their own, and barriers are
        # half as many. An odd tile goes before the loop; after it, ptxas would find no registers free of a wgmma in
        # flight, and serialise (C7513).
        ODD: gl.constexpr = KT % 2
        for i in gl.static_range(STAGES - 1 + ODD):
            _issue(x_ptrs, real, w_ptrs, s_ptrs, x_smem, w_smem, s_smem, i, KT, STAGES, NVFP4)
        acc = warpgroup_mma_init(acc)
        if ODD:
            cp.wait_group(STAGES - 1)
            fence_async_shared()
            a = operand(convert(w_smem.index(0), s_smem.index(0), peaks, L4, FP8), BM, L4, LA, FP8)
            acc = warpgroup_mma(a, x_smem.index(0).permute((1, 0)), acc, is_async=True)
        for i in range(KT // 2):
            kt = ODD + 2 * i
            cp.wait_group(STAGES - 3)
            fence_async_shared()
            acc = _overlapped(acc, x_smem, w_smem, s_smem, peaks, kt % STAGES, BM, L4, LA, FP8)
            acc = _overlapped(acc, x_smem, w_smem, s_smem, peaks, (kt + 1) % STAGES, BM, L4, LA, FP8)
            _issue(x_ptrs, real, w_ptrs, s_ptrs, x_smem, w_smem, s_smem, kt + STAGES - 1, KT, STAGES, NVFP4)
            _issue(x_ptrs, real, w_ptrs, s_ptrs, x_smem, w_smem, s_smem, kt + STAGES, KT, STAGES, NVFP4)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    else:
        for i in gl.static_range(STAGES - 1):
            _issue(x_ptrs, real, w_ptrs, s_ptrs, x_smem, w_smem, s_smem, i, KT, STAGES, NVFP4)
        cp.wait_group(STAGES - 2)
        fence_async_shared()
        words = convert(w_smem.index(0), s_smem.index(0), peaks, L4, FP8)
        for kt in range(KT):
            a = operand(words, BM, L4, LA, FP8)
            acc = warpgroup_mma(a, x_smem.index(kt % STAGES).permute((1, 0)), acc, is_async=True)
            cp.wait_group(STAGES - 3)
            fence_async_shared()
            words = convert(w_smem.index((kt + 1) % STAGES), s_smem.index((kt + 1) % STAGES), peaks, L4, FP8)
            _issue(x_ptrs, real, w_ptrs, s_ptrs, x_smem, w_smem, s_smem, kt + STAGES - 1, KT, STAGES, NVFP4)
            acc = warpgroup_mma_wait(0, deps=(acc,))
    cp.wait_group(0)
    return acc


@gluon.jit
def _overlapped(
    acc, x_smem, w_smem, s_smem, peaks, stage,
    BM: gl.constexpr, L4: gl.constexpr, LA: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """Convert a K tile while the matrix unit works on the one before, queue it, wait for the one before."""
    a = operand(convert(w_smem.index(stage), s_smem.index(stage), peaks, L4, FP8), BM, L4, LA, FP8)
    acc = warpgroup_mma(a, x_smem.index(stage).permute((1, 0)), acc, is_async=True)
    return warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))


@gluon.jit
def row_values(
    bias_ptr, peaks_ptr, expert, block,
    KT: gl.constexpr, ROW_TILES: gl.constexpr, BM: gl.constexpr, HAS_BIAS: gl.constexpr, NVFP4: gl.constexpr,
    FP8: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """float32 [BM] each: the bias of a block's rows, and what their sums are to be multiplied by, of E4M3 weights and
    of NVFP4. Zeros and ones where there is no such thing."""
    LR: gl.constexpr = gl.SliceLayout(1, mma)
    row = gl.minimum(block * BM + gl.arange(0, BM, LR), ROW_TILES * 16 - 1)
    bias = gl.zeros([BM], gl.float32, LR)
    if HAS_BIAS:
        bias = gl.load(bias_ptr + expert * (ROW_TILES * 16) + row).to(gl.float32)
    factor = gl.full([BM], 1.0, gl.float32, LR)
    if FP8:
        factor = row_factor(peaks_ptr + expert * (ROW_TILES * 8), row)
    if NVFP4:
        factor = row_scales(peaks_ptr + expert.to(gl.int64) * (ROW_TILES * (KT + 1) * 16), row, ROW_TILES * 16, KT)
    return bias, factor


@gluon.constexpr_function
def down_layout(rows, warps):
    """How the second GEMM's sums lie before they are stored: eight rows a thread."""
    return gl.BlockedLayout([8, 1], [rows // 8, 256 // rows], [1, warps], [0, 1])


@gluon.jit
def store_gate_up(
    acc, h_ptr, block, first, count,
    ROW_TILES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, WARPS: gl.constexpr,
    GATE: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, H_STRIDE: gl.constexpr, H_SCALE: gl.constexpr,
    FP8: gl.constexpr,
):  # fmt: skip
    """Gate, scale, fragment order; 16-byte stores by place."""
    g, up = gl.split(acc.reshape([BM // 16, 2, 8, BN]).permute([0, 2, 3, 1]))
    h = gated(g, up, GATE, ALPHA, LIMIT)
    if FP8:
        h = (h * H_SCALE).to(gl.float8e4nv)
        # t a b p → p t a b, then b the other way round, in registers: a thread holds 16 neighbours.
        h = h.reshape([BM // 64, 4, 4, 2, BN]).permute([0, 3, 1, 2, 4]).reshape([BM // 2, BN])
        LO: gl.constexpr = gl.BlockedLayout([16, 1], [BM // 32, 1024 // BM], [1, WARPS], [0, 1])
        h = gl.convert_layout(h, LO)
        b0, b1 = gl.split(h.reshape([BM // 4, 2, BN]).permute([0, 2, 1]))
        h = gl.join(b1, b0).permute([0, 2, 1]).reshape([BM // 2, BN])
        h = gl.convert_layout(h, LO, assert_trivial=True)
    else:
        h = (h * X_SCALE).to(gl.bfloat16)
        h = h.reshape([BM // 64, 4, 2, 2, 2, BN]).permute([0, 2, 3, 1, 4, 5]).reshape([BM // 2, BN])  # t j c → j c t
        LO: gl.constexpr = gl.BlockedLayout([8, 1], [BM // 16, 512 // BM], [1, WARPS], [0, 1])
        h = gl.convert_layout(h, LO)
    unit = block * (BM // 2) + gl.arange(0, BM // 2, gl.SliceLayout(1, LO))
    n = gl.arange(0, BN, gl.SliceLayout(0, LO))
    at = (first + n).to(gl.int64)[None, :] * H_STRIDE + unit[:, None]
    gl.store(h_ptr + at, h, mask=(n < count)[None, :] & (unit < ROW_TILES * 8)[:, None])


@gluon.jit
def store_down(
    y, parts_ptr, pair, block, count,
    ROW_TILES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """16-byte stores by pair. ``pair`` lies as the columns of ``down_layout`` do."""
    LO: gl.constexpr = down_layout(BM, WARPS)
    y = gl.convert_layout(y.to(gl.bfloat16), LO)
    row = block * BM + gl.arange(0, BM, gl.SliceLayout(1, LO))
    n = gl.arange(0, BN, gl.SliceLayout(0, LO))
    at = pair.to(gl.int64)[None, :] * (ROW_TILES * 16) + row[:, None]
    gl.store(parts_ptr + at, y, mask=(n < count)[None, :] & (row < ROW_TILES * 16)[:, None])


@gluon.jit
def _tile(
    x_ptr, factors_ptr, w_ptr, s_ptr, peaks_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, w_smem, s_smem,
    expert, block, first, count,
    KT: gl.constexpr, ROW_TILES: gl.constexpr, TOP_K: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, OVERLAP: gl.constexpr, NVFP4: gl.constexpr, FP8: gl.constexpr,
    FIRST: gl.constexpr, HAS_BIAS: gl.constexpr, GATE: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    H_SCALE: gl.constexpr, OUT_STRIDE: gl.constexpr,
):  # fmt: skip
    """One program's work with ``BN`` columns."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 32 if FP8 else 16])
    LX: gl.constexpr = gl.NVMMASharedLayout(64, 8, rank=2) if FP8 else gl.NVMMASharedLayout(128, 16, rank=2)
    x_smem = gl.allocate_shared_memory(gl.float8e4nv if FP8 else gl.bfloat16, [STAGES, BN, 64], LX)
    place = first + gl.minimum(gl.arange(0, BN, gl.SliceLayout(0, mma)), count - 1)
    rows = gl.load(order_ptr + place) // TOP_K if FIRST else place
    acc = _product(
        x_ptr, rows, count, w_ptr, s_ptr, peaks_ptr, expert, block, x_smem, w_smem, s_smem,
        KT, ROW_TILES, BM, BN, STAGES, WARPS, OVERLAP, NVFP4, FP8, mma,
    )  # fmt: skip
    bias, row_scale = row_values(bias_ptr, peaks_ptr, expert, block, KT, ROW_TILES, BM, HAS_BIAS, NVFP4, FP8, mma)
    if FP8:
        acc = acc * row_scale[:, None] * (gl.load(factors_ptr + rows)[None, :] if FIRST else 1.0 / H_SCALE)
    if NVFP4:
        acc = acc * row_scale[:, None]
    if HAS_BIAS:
        acc += bias[:, None]
    if FIRST:
        store_gate_up(
            acc, out_ptr, block, first, count, ROW_TILES, BM, BN, WARPS, GATE, ALPHA, LIMIT, OUT_STRIDE, H_SCALE, FP8
        )
    else:
        y = acc * gl.load(weights_ptr + gl.load(order_ptr + place))[None, :]
        n = gl.arange(0, BN, gl.SliceLayout(0, down_layout(BM, WARPS)))
        pair = gl.load(order_ptr + first + gl.minimum(n, count - 1))
        store_down(y, out_ptr, pair, block, count, ROW_TILES, BM, BN, WARPS)


@gluon.jit
def grouped_gemm(
    x_ptr,  # bf16 or E4M3 [tokens or places, 64 * KT], prepared
    factors_ptr,  # E4M3: float32 [tokens]
    w_ptr,
    s_ptr,
    peaks_ptr,  # E4M3: what rows were divided by; NVFP4: the scale words, with the scales of rows
    bias_ptr,  # bf16 [experts, 16 * ROW_TILES], packed row order
    out_ptr,  # FIRST: h by place, like x; else parts [pairs, 16 * ROW_TILES] by pair
    tiles_ptr,
    order_ptr,
    weights_ptr,  # float32 [pairs]
    offsets_ptr,
    KT: gl.constexpr,
    ROW_TILES: gl.constexpr,
    TOP_K: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
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
    """One of the two GEMMs of the layer. A tile with few tokens takes a program of half or a quarter of the columns."""
    BLOCKS: gl.constexpr = (ROW_TILES * 16 + BM - 1) // BM
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pid = gl.program_id(0)
    entry = pid // BLOCKS
    expert = gl.load(tiles_ptr + entry * 4)
    if expert >= 0:
        first_tile = gl.load(tiles_ptr + entry * 4 + 3)
        pairs = gl.load(offsets_ptr + expert + 1) - gl.load(offsets_ptr + expert)
        num_tiles = (pairs + BN - 1) // BN
        within = pid - first_tile * BLOCKS
        block = within // num_tiles
        tile = first_tile + within % num_tiles
        first = gl.load(tiles_ptr + tile * 4 + 1)
        count = gl.load(tiles_ptr + tile * 4 + 2)
        LW: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [2, 1, 0])
        LS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [0])
        w_smem = gl.allocate_shared_memory(gl.int32, [STAGES, BM // 2, 4, 4], LW)
        s_smem = gl.allocate_shared_memory(gl.int32, [STAGES, BM if NVFP4 else BM // 2], LS)
        if count > BN // 2:
            _tile(
                x_ptr, factors_ptr, w_ptr, s_ptr, peaks_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, w_smem, s_smem,
                expert, block, first, count, KT, ROW_TILES, TOP_K, BM, BN,
                STAGES, WARPS, OVERLAP, NVFP4, FP8, FIRST, HAS_BIAS, GATE, ALPHA, LIMIT, H_SCALE, OUT_STRIDE,
            )  # fmt: skip
        elif count > BN // 4:
            _tile(
                x_ptr, factors_ptr, w_ptr, s_ptr, peaks_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, w_smem, s_smem,
                expert, block, first, count, KT, ROW_TILES, TOP_K, BM, BN // 2,
                STAGES, WARPS, OVERLAP, NVFP4, FP8, FIRST, HAS_BIAS, GATE, ALPHA, LIMIT, H_SCALE, OUT_STRIDE,
            )  # fmt: skip
        else:
            _tile(
                x_ptr, factors_ptr, w_ptr, s_ptr, peaks_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, w_smem, s_smem,
                expert, block, first, count, KT, ROW_TILES, TOP_K, BM, BN // 4,
                STAGES, WARPS, OVERLAP, NVFP4, FP8, FIRST, HAS_BIAS, GATE, ALPHA, LIMIT, H_SCALE, OUT_STRIDE,
            )  # fmt: skip
