"""Jit code of the grouped expert GEMMs for large batches on ``wgmma``: packed weights → registers → matrix unit.

A program owns ``BM`` weight rows and one tile of the work list, up to ``BN`` tokens. Weights are the left operand and
come from registers: a lane's packed words are its fragments already (``kernels/layouts.py``), so shared memory carries
them as 4-bit codes and no conversion crosses lanes. Tokens are the right operand, from shared memory. Words, scales
and tokens of a K tile arrive through a ring of ``STAGES`` filled by ``cp.async``.

``wgmma`` sums over all of K, so a group's scale is multiplied into its weights, exactly: weight * scale * 2**-64 in
bf16, against activations that carry 2**64 (``fragments_jit``).

Token columns are stored in the order in which the fragments meet them (``interleaved``): within each 32, column
8 t + 4 j + 2 c + p stands at 16 j + 8 c + 2 t + p. ``prepare_tokens`` writes the layer's input so, and the first GEMM
its output; both also scale by 2**64 and fill up to a multiple of 64.

Programs of one expert run side by side, token tiles fastest: a block of weight rows is read from memory once and from
L2 by the expert's other token tiles.
"""

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

from microscale.kernels.moe.fragments_jit import MXFP4_TO_BF16, X_SCALE, gated

_MXFP4_TO_WORDS: tl.constexpr = tl.constexpr(MXFP4_TO_BF16)
# Four scale bytes b → four words with 2**(b - 127 + 62) twice in bf16: 62 is 126, the weights' constant, less the
# activations' 64.
SCALE_WORDS = """{
    .reg .b32 s, a, b;
    add.u32 s, $4, 0x3E3E3E3E;
    and.b32 a, s, 0x00FF00FF;
    shl.b32 a, a, 7;
    shr.u32 b, s, 8;
    and.b32 b, b, 0x00FF00FF;
    shl.b32 b, b, 7;
    prmt.b32 $0, a, a, 0x1010;
    prmt.b32 $1, b, b, 0x1010;
    prmt.b32 $2, a, a, 0x3232;
    prmt.b32 $3, b, b, 0x3232;
}"""
_SCALE_WORDS: tl.constexpr = tl.constexpr(SCALE_WORDS)


@triton.jit
def prepare_tokens(
    x_ptr,  # bf16 [tokens, width]
    out_ptr,  # bf16 [tokens, PADDED], interleaved, times 2**64
    width,
    stride_x,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token: interleaved, times 2**64, zeros up to ``PADDED``."""
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = at // 32 * 32 + at // 2 % 4 * 8 + at // 8 % 4 * 2 + at % 2
    token = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + token * stride_x + column, mask=column < width, other=0.0)
    tl.store(out_ptr + token * PADDED + at, (x.to(tl.float32) * X_SCALE).to(tl.bfloat16), mask=at < PADDED)


@gluon.jit
def _dequantized(w_smem, s_smem, stage, L4: gl.constexpr):
    """One K tile as unscaled bf16 pairs [8 R, 4 = t, 4 = v] of fields 0 to 3, and the scale words of v = 0 to 3.

    All but the last operation: that one writes the registers that ``wgmma`` reads. Without OVERLAP it belongs after the
    wait for the previous ``wgmma`` (before it, ptxas serialises them all: warning C7513).
    """
    LQ: gl.constexpr = gl.SliceLayout(3, L4)
    q = w_smem.index(stage).load(LQ)
    s = s_smem.index(stage).load(gl.SliceLayout(1, gl.SliceLayout(2, LQ)))[:, None, None]
    f0, f1, f2, f3 = gl.inline_asm_elementwise(
        _MXFP4_TO_WORDS, "=&r,=&r,=&r,=&r,r", [q],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    s0, s1, s2, s3 = gl.inline_asm_elementwise(
        _SCALE_WORDS, "=&r,=&r,=&r,=&r,r", [s],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    # v lies in registers: the choice below is made at compile time.
    v = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LQ)))[None, None, :]
    scale = gl.where(v == 0, s0, gl.where(v == 1, s1, gl.where(v == 2, s2, s3)))
    return f0, f1, f2, f3, scale


@gluon.jit
def _scaled(f, scale, z):
    """bf16 pairs times their scale: [8 R, t, v] words → [8 R, t, v, p] numbers."""
    return gl.inline_asm_elementwise(
        "mul.bf16x2 $0, $1, $3;", "=r,r,r,r,r", [f[:, :, :, None] + z, scale[:, :, :, None] + z],
        dtype=gl.bfloat16, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def _operand(words, BM: gl.constexpr, L4: gl.constexpr, LA: gl.constexpr):
    """What ``_dequantized`` left → the left operand [BM, 64], columns in interleaved order."""
    z = gl.zeros([BM // 2, 4, 4, 2], gl.int32, L4)
    low = gl.join(_scaled(words[0], words[4], z), _scaled(words[1], words[4], z))
    high = gl.join(_scaled(words[2], words[4], z), _scaled(words[3], words[4], z))
    a = gl.join(low, high).reshape([BM // 16, 8, 4, 2, 2, 2, 2, 2])  # R g t G h p c j
    a = a.permute([0, 4, 1, 3, 7, 6, 2, 5]).reshape([BM, 64])  # R h g | G j c t p
    return gl.convert_layout(a, LA, assert_trivial=True)


@gluon.jit
def _issue(x_ptrs, w_ptrs, s_ptrs, x_smem, w_smem, s_smem, kt, KT: gl.constexpr, STAGES: gl.constexpr):
    if kt < KT:
        stage = kt % STAGES
        cp.async_copy_global_to_shared(x_smem.index(stage), x_ptrs + kt * 64)
        cp.async_copy_global_to_shared(w_smem.index(stage), w_ptrs + kt * 128)
        cp.async_copy_global_to_shared(s_smem.index(stage), s_ptrs + kt * 8)
    cp.commit_group()


@gluon.jit
def _product(
    x_ptr, rows, w_ptr, s_ptr, expert, block, x_smem, w_smem, s_smem,
    KT: gl.constexpr, ROW_TILES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, OVERLAP: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """float32 [BM, BN]: row block ``block`` of an expert times the tokens ``rows [BN]``."""
    LA: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    L4: gl.constexpr = gl.BlockedLayout([1, 1, 4, 2], [8, 4, 1, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    LQ: gl.constexpr = gl.SliceLayout(3, L4)
    LX: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    LC: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    column = gl.arange(0, 64, gl.SliceLayout(0, LX))
    x_ptrs = x_ptr + gl.convert_layout(rows, gl.SliceLayout(1, LX)).to(gl.int64)[:, None] * (KT * 64) + column[None, :]
    rg = gl.arange(0, BM // 2, gl.SliceLayout(1, gl.SliceLayout(2, LQ)))
    t = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, LQ)))
    v = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LQ)))
    # Row tiles past the end repeat the last one: every address is valid, and the result is not stored.
    tile = gl.minimum(block * (BM // 16) + rg // 8, ROW_TILES - 1)
    at = (tile * (KT * 128) + rg % 8 * 16)[:, None, None] + t[None, :, None] * 4 + v[None, None, :]
    w_ptrs = w_ptr + expert.to(gl.int64) * (ROW_TILES * KT * 128) + at
    rs = gl.arange(0, BM // 2, LC)
    s_tile = gl.minimum(block * (BM // 16) + rs // 8, ROW_TILES - 1)
    s_ptrs = s_ptr + expert.to(gl.int64) * (ROW_TILES * KT * 8) + (s_tile * (KT * 8) + rs % 8)

    acc = gl.zeros([BM, BN], gl.float32, mma)
    if OVERLAP:
        # Two tiles a turn, so that the operand in flight and the next one have registers of their own. An odd tile goes
        # before the loop; after it, ptxas would find no registers free of a wgmma in flight, and serialise (C7513).
        ODD: gl.constexpr = KT % 2
        for i in gl.static_range(STAGES - 2 + ODD):
            _issue(x_ptrs, w_ptrs, s_ptrs, x_smem, w_smem, s_smem, i, KT, STAGES)
        acc = warpgroup_mma_init(acc)
        if ODD:
            cp.wait_group(STAGES - 2)
            fence_async_shared()
            a = _operand(_dequantized(w_smem, s_smem, 0, L4), BM, L4, LA)
            acc = warpgroup_mma(a, x_smem.index(0).permute((1, 0)), acc, is_async=True)
        for i in range(KT // 2):
            kt = ODD + 2 * i
            acc = _overlapped(acc, x_ptrs, w_ptrs, s_ptrs, x_smem, w_smem, s_smem, kt, KT, BM, STAGES, L4, LA)
            acc = _overlapped(acc, x_ptrs, w_ptrs, s_ptrs, x_smem, w_smem, s_smem, kt + 1, KT, BM, STAGES, L4, LA)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    else:
        for i in gl.static_range(STAGES - 1):
            _issue(x_ptrs, w_ptrs, s_ptrs, x_smem, w_smem, s_smem, i, KT, STAGES)
        cp.wait_group(STAGES - 2)
        fence_async_shared()
        words = _dequantized(w_smem, s_smem, 0, L4)
        for kt in range(KT):
            a = _operand(words, BM, L4, LA)
            acc = warpgroup_mma(a, x_smem.index(kt % STAGES).permute((1, 0)), acc, is_async=True)
            cp.wait_group(STAGES - 3)
            fence_async_shared()
            words = _dequantized(w_smem, s_smem, (kt + 1) % STAGES, L4)
            _issue(x_ptrs, w_ptrs, s_ptrs, x_smem, w_smem, s_smem, kt + STAGES - 1, KT, STAGES)
            acc = warpgroup_mma_wait(0, deps=(acc,))
    cp.wait_group(0)
    return acc


@gluon.jit
def _overlapped(
    acc, x_ptrs, w_ptrs, s_ptrs, x_smem, w_smem, s_smem, kt,
    KT: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, L4: gl.constexpr, LA: gl.constexpr,
):  # fmt: skip
    """Convert K tile ``kt`` while the matrix unit works on the one before, queue it, wait for the one before."""
    cp.wait_group(STAGES - 3)
    fence_async_shared()
    a = _operand(_dequantized(w_smem, s_smem, kt % STAGES, L4), BM, L4, LA)
    acc = warpgroup_mma(a, x_smem.index(kt % STAGES).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(acc,)))
    _issue(x_ptrs, w_ptrs, s_ptrs, x_smem, w_smem, s_smem, kt + STAGES - 2, KT, STAGES)
    return acc


@gluon.jit
def _finish_gate_up(
    acc, bias_ptr, h_ptr, expert, block, first, count,
    ROW_TILES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, WARPS: gl.constexpr, HAS_BIAS: gl.constexpr,
    GELU: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, H_STRIDE: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Bias, gate, 2**64, interleave; 16-byte stores by place."""
    if HAS_BIAS:
        row = gl.minimum(block * BM + gl.arange(0, BM, gl.SliceLayout(1, mma)), ROW_TILES * 16 - 1)
        acc += gl.load(bias_ptr + expert * (ROW_TILES * 16) + row).to(gl.float32)[:, None]
    g, up = gl.split(acc.reshape([BM // 16, 2, 8, BN]).permute([0, 2, 3, 1]))
    h = (gated(g, up, GELU, ALPHA, LIMIT) * X_SCALE).to(gl.bfloat16)
    h = h.reshape([BM // 64, 4, 2, 2, 2, BN]).permute([0, 2, 3, 1, 4, 5]).reshape([BM // 2, BN])  # t j c p → j c t p
    LANES: gl.constexpr = BM // 16 if BM < 512 else 32
    LO: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    h = gl.convert_layout(h, LO)
    unit = block * (BM // 2) + gl.arange(0, BM // 2, gl.SliceLayout(1, LO))
    n = gl.arange(0, BN, gl.SliceLayout(0, LO))
    at = (first + n).to(gl.int64)[None, :] * H_STRIDE + unit[:, None]
    gl.store(h_ptr + at, h, mask=(n < count)[None, :] & (unit < ROW_TILES * 8)[:, None])


@gluon.jit
def _finish_down(
    acc, bias_ptr, parts_ptr, order_ptr, weights_ptr, expert, block, first, count,
    ROW_TILES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, WARPS: gl.constexpr, HAS_BIAS: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """Bias, routing weight; 16-byte stores by pair."""
    if HAS_BIAS:
        row = gl.minimum(block * BM + gl.arange(0, BM, gl.SliceLayout(1, mma)), ROW_TILES * 16 - 1)
        acc += gl.load(bias_ptr + expert * (ROW_TILES * 16) + row).to(gl.float32)[:, None]
    n = gl.arange(0, BN, gl.SliceLayout(0, mma))
    pair = gl.load(order_ptr + first + gl.minimum(n, count - 1))
    y = (acc * gl.load(weights_ptr + pair)[None, :]).to(gl.bfloat16)
    LANES: gl.constexpr = BM // 8 if BM < 256 else 32
    LO: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    y = gl.convert_layout(y, LO)
    row = block * BM + gl.arange(0, BM, gl.SliceLayout(1, LO))
    n = gl.arange(0, BN, gl.SliceLayout(0, LO))
    pair = gl.load(order_ptr + first + gl.minimum(n, count - 1)).to(gl.int64)
    at = pair[None, :] * (ROW_TILES * 16) + row[:, None]
    gl.store(parts_ptr + at, y, mask=(n < count)[None, :] & (row < ROW_TILES * 16)[:, None])


@gluon.jit
def _tile(
    x_ptr, w_ptr, s_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, w_smem, s_smem, expert, block, first, count,
    KT: gl.constexpr, ROW_TILES: gl.constexpr, TOP_K: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, OVERLAP: gl.constexpr, FIRST: gl.constexpr, HAS_BIAS: gl.constexpr,
    GELU: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, OUT_STRIDE: gl.constexpr,
):  # fmt: skip
    """One program's work with ``BN`` columns."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    place = first + gl.minimum(gl.arange(0, BN, gl.SliceLayout(0, mma)), count - 1)
    rows = gl.load(order_ptr + place) // TOP_K if FIRST else place
    acc = _product(
        x_ptr, rows, w_ptr, s_ptr, expert, block, x_smem, w_smem, s_smem,
        KT, ROW_TILES, BM, BN, STAGES, WARPS, OVERLAP, mma,
    )  # fmt: skip
    if FIRST:
        _finish_gate_up(
            acc, bias_ptr, out_ptr, expert, block, first, count,
            ROW_TILES, BM, BN, WARPS, HAS_BIAS, GELU, ALPHA, LIMIT, OUT_STRIDE, mma,
        )  # fmt: skip
    else:
        _finish_down(
            acc, bias_ptr, out_ptr, order_ptr, weights_ptr, expert, block, first, count,
            ROW_TILES, BM, BN, WARPS, HAS_BIAS, mma,
        )  # fmt: skip


@gluon.jit
def grouped_gemm(
    x_ptr,  # bf16 [tokens or places, 64 * KT], interleaved, times 2**64
    w_ptr,
    s_ptr,
    bias_ptr,  # bf16 [experts, 16 * ROW_TILES], packed row order
    out_ptr,  # FIRST: h by place, like x; else parts [pairs, 16 * ROW_TILES] by pair
    offsets_ptr,
    tiles_ptr,
    order_ptr,
    weights_ptr,  # float32 [pairs]
    KT: gl.constexpr,
    ROW_TILES: gl.constexpr,
    TOP_K: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
    FIRST: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GELU: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    OUT_STRIDE: gl.constexpr,
):
    """One of the two GEMMs of the layer. A tile with few tokens takes a program of half or a quarter of the columns."""
    BLOCKS: gl.constexpr = (ROW_TILES * 16 + BM - 1) // BM
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
        s_smem = gl.allocate_shared_memory(gl.int32, [STAGES, BM // 2], LS)
        if count > BN // 2:
            _tile(
                x_ptr, w_ptr, s_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, w_smem, s_smem,
                expert, block, first, count, KT, ROW_TILES, TOP_K, BM, BN,
                STAGES, WARPS, OVERLAP, FIRST, HAS_BIAS, GELU, ALPHA, LIMIT, OUT_STRIDE,
            )  # fmt: skip
        elif count > BN // 4:
            _tile(
                x_ptr, w_ptr, s_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, w_smem, s_smem,
                expert, block, first, count, KT, ROW_TILES, TOP_K, BM, BN // 2,
                STAGES, WARPS, OVERLAP, FIRST, HAS_BIAS, GELU, ALPHA, LIMIT, OUT_STRIDE,
            )  # fmt: skip
        else:
            _tile(
                x_ptr, w_ptr, s_ptr, bias_ptr, out_ptr, order_ptr, weights_ptr, w_smem, s_smem,
                expert, block, first, count, KT, ROW_TILES, TOP_K, BM, BN // 4,
                STAGES, WARPS, OVERLAP, FIRST, HAS_BIAS, GELU, ALPHA, LIMIT, OUT_STRIDE,
            )  # fmt: skip
