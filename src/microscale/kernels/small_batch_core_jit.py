"""What the small-batch kernels of dense layers and of experts share: one tile of a walk along K, and the sum of slices.

Weights are the left operand of ``mma.sync`` m16n8k16 and the tokens the right one. A warp walks along K over row tiles
of 16 rows in tiles of 64 columns, two groups of 32; ``S`` warps share a row tile along K (slices), or are its experts.
The walks themselves differ, and so do their bits: a dense layer has any K and cuts it evenly, an expert's K is a
constant of the kernel.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from microscale.kernels.fragments_jit import (
    MXFP4_UNSCALE,
    MXFP8_UNSCALE,
    group_factors,
    group_scales,
    mxfp4_fragments,
    mxfp8_fragments,
    nvfp4_fragments,
)


@gluon.constexpr_function
def token_layout(slices, warps_n):
    """Tokens [S, N, 32 columns of a group]: 16 bytes a lane."""
    return gl.BlockedLayout([1, 1, 8], [1, 8, 4], [slices, 1, warps_n], [2, 1, 0])


@gluon.constexpr_function
def pair_layout(slices, warps_n):
    """Words [S, B, 32 lanes, 4] under the places p of a pair."""
    return gl.BlockedLayout([1, 1, 1, 4, 2], [1, 1, 32, 1, 1], [slices, warps_n, 1, 1, 1], [4, 3, 2, 1, 0])


@gluon.constexpr_function
def scale_layout(slices, warps_n):
    """Scale words [S, B, 8 = g] under h and the lanes t."""
    return gl.BlockedLayout([1, 1, 2, 1, 1], [1, 1, 1, 8, 4], [slices, warps_n, 1, 1, 1], [4, 3, 2, 1, 0])


@gluon.jit
def issue_loads_here():
    """Loads above stay above: without this ptxas may sink a load to its use, and nothing is in flight any more."""
    gl.inline_asm_elementwise("bar.warp.sync -1; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def weight_fragments(q0, q1, z, BITS: gl.constexpr, LA: gl.constexpr):
    """Words of groups 0 and 1 (MXFP4 holds both in the first) → left operands of (group, step) = 00, 01, 10, 11."""
    if BITS == 4:
        return mxfp4_fragments(q0, z, LA)
    else:
        a00, a01 = mxfp8_fragments(q0, z, LA)
        a10, a11 = mxfp8_fragments(q1, z, LA)
        return a00, a01, a10, a11


@gluon.jit
def add_scaled(acc, a, b, scales, h, ROW_SCALES: gl.constexpr, mma: gl.constexpr):
    """``acc`` plus one tile of 64 columns: two groups, each summed by itself and then scaled in float32."""
    a00, a01, a10, a11 = a
    b00, b01, b10, b11 = b
    if ROW_SCALES:
        f0, f1 = group_factors(scales, h, gl.SliceLayout(2, mma))
    else:
        f0, f1 = group_scales(scales, h, gl.SliceLayout(2, mma))
    zero = gl.zeros(acc.shape, gl.float32, mma)
    acc += mma_v2(a01, b01, mma_v2(a00, b00, zero)) * f0[:, :, None]
    acc += mma_v2(a11, b11, mma_v2(a10, b10, zero)) * f1[:, :, None]
    return acc


@gluon.jit
def add_tile(acc, q0, q1, b, scales, z, h, BITS: gl.constexpr, ROW_SCALES: gl.constexpr, mma: gl.constexpr):
    """``acc`` plus one tile of 64 columns: weights and scale words as they were loaded, times the operands ``b``."""
    LA: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    if ROW_SCALES and BITS == 4:
        return add_products(acc, nvfp4_fragments(q0, scales, z, LA), b)
    else:
        return add_scaled(acc, weight_fragments(q0, q1, z, BITS, LA), b, scales, h, ROW_SCALES, mma)


@gluon.jit
def add_products(acc, a, b):
    """``acc`` plus one tile of 64 columns whose scales are in the weights, or belong to whole rows."""
    a00, a01, a10, a11 = a
    b00, b01, b10, b11 = b
    acc = mma_v2(a01, b01, mma_v2(a00, b00, acc))
    return mma_v2(a11, b11, mma_v2(a10, b10, acc))


@gluon.jit
def word_pairs(s_ptr):
    """Of FP8 blocks: scale words as pairs, group 0's and group 1's of the rows g and g + 8."""
    return s_ptr.to(gl.pointer_type(gl.int64), bitcast=True)


@gluon.jit
def lane_scales(lane):
    """Of NVFP4: which of a tile's 16 scale words a lane has."""
    return lane // 4 * 2 + lane % 4 // 2


@gluon.jit
def row_scales(s_ptr, row, rows, k_tiles):
    """The float32 scales of packed rows, which stand behind the scale words of their row tiles."""
    at = ((row // 16 + 1) * (k_tiles + 1) - 1) * 16 + row % 16
    return gl.load(s_ptr + at, mask=row < rows, other=0).to(gl.float32, bitcast=True)


@gluon.jit
def unscaled(r, BITS: gl.constexpr, ROW_SCALES: gl.constexpr):
    """Sums of products, less the power of two that their weights and activations carry (``fragments_jit``)."""
    if not ROW_SCALES:
        if BITS == 4:
            r *= MXFP4_UNSCALE
        elif BITS == 8:
            r *= MXFP8_UNSCALE
    return r


@gluon.jit
def sum_slices(acc, BITS: gl.constexpr, ROW_SCALES: gl.constexpr):
    """Partial sums [S, 16 B, N] of the slices → [16 B, N], always in the same order."""
    return unscaled(gl.sum(acc, axis=0), BITS, ROW_SCALES)
