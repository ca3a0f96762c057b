"""Packed weights → matrix-unit fragments, in registers: jit helpers that every Gluon expert kernel shares.

The words are those of ``kernels/layouts.py``. Conversions are PTX because LLVM takes arithmetic on packed halves apart
into scalar code. The texts are module constants: a test executes them, word for word, in an interpreter of the few
instructions that they use, against the format's own decoder.

A converted weight is exact up to a constant power of two, which the caller takes back in float32:

    MXFP4   bf16 = E2M1 * 2**-126      9 operations for 8 weights
    MXFP8   bf16 = E4M3 * 2**-120      7 operations for 4 weights

NVFP4's scales of 16 columns are in its weights, which six significant bits hold, so nothing is left to take back:

    NVFP4   bf16 = E2M1 * scale * 2**-64    13 operations for 8 weights, and 2 for their factor

FP8 under float32 scales of blocks is MXFP8 whose groups have bf16 factors that make up for the constant, under one
float32 scale a row.

Products of such weights with ordinary activations would be subnormal in float32, so activations carry 2**64
(``X_SCALE``): exact in bf16 for every |x| between 2**-126 and 2**63.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

X_EXPONENT = 64
X_SCALE: tl.constexpr = tl.constexpr(2.0**X_EXPONENT)
MXFP4_UNSCALE: tl.constexpr = tl.constexpr(2.0 ** (126 - X_EXPONENT))
MXFP8_UNSCALE: tl.constexpr = tl.constexpr(2.0 ** (120 - X_EXPONENT))

# One word ($4; $5 is its copy) → the bf16 pairs of columns (0, 1), (2, 3), (4, 5), (6, 7). lop3 0xEA is (a & b) | c.
MXFP4_TO_BF16 = """{
    .reg .b32 a, b, c, d;
    and.b32 $0, $4, 0x81C081C0;
    shl.b32 a, $4, 6;
    and.b32 $1, a, 0x81C081C0;
    shf.r.wrap.b32 b, $4, $4, 6;
    and.b32 $2, b, 0x81C081C0;
    shl.b32 c, $4, 4;
    shr.u32 d, $4, 4;
    and.b32 c, c, 0x81808180;
    lop3.b32 $3, d, 0x00400040, c, 0xEA;
}"""
# The same, times the factor ($6; $7 is its copy). SM80 has no plain bf16x2 product.
NVFP4_TO_BF16 = (
    MXFP4_TO_BF16.removesuffix("}")
    + """
    .reg .b32 z;
    mov.b32 z, 0x80008000;
    fma.rn.bf16x2 $0, $0, $6, z;
    fma.rn.bf16x2 $1, $1, $6, z;
    fma.rn.bf16x2 $2, $2, $6, z;
    fma.rn.bf16x2 $3, $3, $6, z;
}"""
)
# Four of NVFP4's scale bytes → the factors of v = 0 to 3, twice in a word each: 2**(126 - 64) times the scale, whose
# byte lacks an exponent of 127 - 10.
NVFP4_FACTORS = """{
    .reg .b32 a, b, c, d, z;
    mov.b32 z, 0;
    prmt.b32 a, $4, z, 0x4040;
    prmt.b32 b, $4, z, 0x4141;
    prmt.b32 c, $4, z, 0x4242;
    prmt.b32 d, $4, z, 0x4343;
    mad.lo.u32 $0, a, 16, 0x59805980;
    mad.lo.u32 $1, b, 16, 0x59805980;
    mad.lo.u32 $2, c, 16, 0x59805980;
    mad.lo.u32 $3, d, 16, 0x59805980;
}"""
# One word ($2; $3 is its copy) → the bf16 pairs of columns (0, 1) and (2, 3).
MXFP8_TO_BF16 = """{
    .reg .b32 a, b, c, d;
    shr.u32 a, $2, 4;
    and.b32 b, $2, 0x80008000;
    lop3.b32 $0, a, 0x07F007F0, b, 0xEA;
    shl.b32 c, $2, 8;
    shl.b32 d, $2, 4;
    and.b32 c, c, 0x80008000;
    lop3.b32 $1, d, 0x07F007F0, c, 0xEA;
}"""
# Two bf16 numbers times 2**64 (0x5F80); adding -0 keeps signed zeros. SM80 has no plain bf16x2 product.
SCALE_BF16 = """{
    .reg .b32 a, b;
    mov.b32 a, 0x5F805F80;
    mov.b32 b, 0x80008000;
    fma.rn.bf16x2 $0, $1, a, b;
}"""

_MXFP4_TO_BF16: tl.constexpr = tl.constexpr(MXFP4_TO_BF16)
_NVFP4_TO_BF16: tl.constexpr = tl.constexpr(NVFP4_TO_BF16)
_NVFP4_FACTORS: tl.constexpr = tl.constexpr(NVFP4_FACTORS)
_MXFP8_TO_BF16: tl.constexpr = tl.constexpr(MXFP8_TO_BF16)
_SCALE_BF16: tl.constexpr = tl.constexpr(SCALE_BF16)


@gluon.jit
def scale_activations(x):
    """bf16 numbers times ``X_SCALE``."""
    return gl.inline_asm_elementwise(_SCALE_BF16, "=r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def mxfp4_fragments(q, z, LA: gl.constexpr):
    """Words int32 [S, B, 32, 4] of one tile per row tile → left operands [S, 16 B, 16] of (G, j) = 00, 01, 10, 11.

    Step j of group G meets columns i = 4 j + 2 c + p of each lane: c is the lower or upper half of a fragment, p the
    half of a register. ``z`` is zeros [S, B, 32, 4, 2]: it gives every word the two places of a bf16 pair.
    """
    f0, f1, f2, f3 = gl.inline_asm_elementwise(
        _MXFP4_TO_BF16, "=&r,=&r,=&r,=&r,r,r", [q[:, :, :, :, None] + z],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    a00, a10 = _by_group(f0, f1, LA)
    a01, a11 = _by_group(f2, f3, LA)
    return a00, a01, a10, a11


@gluon.jit
def nvfp4_factors(s, v):
    """Scale words → the factor of pair ``v``, twice in a word. v lies in registers: the choice is made at compile
    time."""
    s0, s1, s2, s3 = gl.inline_asm_elementwise(
        _NVFP4_FACTORS, "=&r,=&r,=&r,=&r,r", [s],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.where(v == 0, s0, gl.where(v == 1, s1, gl.where(v == 2, s2, s3)))


@gluon.jit
def nvfp4_fragments(q, s, z, LA: gl.constexpr):
    """The same of NVFP4, with the scale words ``s`` [S, B, 32, 1] of the lanes in the weights."""
    LV: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, z.type.layout))))
    factor = nvfp4_factors(s, gl.arange(0, 4, LV)[None, None, None, :])
    f0, f1, f2, f3 = gl.inline_asm_elementwise(
        _NVFP4_TO_BF16, "=&r,=&r,=&r,=&r,r,r,r,r", [q[:, :, :, :, None] + z, factor[:, :, :, :, None] + z],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    a00, a10 = _by_group(f0, f1, LA)
    a01, a11 = _by_group(f2, f3, LA)
    return a00, a01, a10, a11


@gluon.jit
def _by_group(low, high, LA: gl.constexpr):
    """bf16 [S, B, 32, (G h), p] of c = 0 and c = 1 → operands of groups 0 and 1."""
    S: gl.constexpr = low.shape[0]
    B: gl.constexpr = low.shape[1]
    a = gl.join(low, high).reshape([S, B, 8, 4, 2, 2, 2, 2]).permute([0, 1, 5, 2, 7, 3, 6, 4])  # h g c t p | G
    a0, a1 = gl.split(a)
    a0 = gl.convert_layout(a0.reshape([S, B * 16, 16]), LA, assert_trivial=True)
    a1 = gl.convert_layout(a1.reshape([S, B * 16, 16]), LA, assert_trivial=True)
    return a0, a1


@gluon.jit
def mxfp8_fragments(q, z, LA: gl.constexpr):
    """Words int32 [S, B, 32, 4] of one group per row tile → left operands [S, 16 B, 16] of steps j = 0, 1."""
    f0, f1 = gl.inline_asm_elementwise(
        _MXFP8_TO_BF16, "=&r,=&r,r,r", [q[:, :, :, :, None] + z],
        dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    return _by_group(f0, f1, LA)  # a lane's words are (j h): steps stand where MXFP4 has groups


@gluon.jit
def token_fragments(x, LB: gl.constexpr):
    """One group of 32 columns of N tokens, ``x`` bf16 [S, N, 32] → right operands [S, 16, N] of steps j = 0, 1."""
    S: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    b0, b1 = gl.split(x.reshape([S, N, 4, 2, 2, 2]).permute([0, 4, 2, 5, 1, 3]))  # c t p n | j
    b0 = gl.convert_layout(b0.reshape([S, 16, N]), LB, assert_trivial=True)
    b1 = gl.convert_layout(b1.reshape([S, 16, N]), LB, assert_trivial=True)
    return b0, b1


@gluon.jit
def group_scales(s, h, LS: gl.constexpr):
    """Scale words int32 [S, B, 1, 8] → float32 [S, 16 B] of group 0 and of group 1. Byte 0 gives 0.0 for 2**-127.

    ``h`` is 0 and 1 along the third axis, which lies in registers: the shifts are constants in the machine code.
    """
    S: gl.constexpr = s.shape[0]
    B: gl.constexpr = s.shape[1]
    f0 = (gl.where(h == 0, s << 23, s << 15) & 0x7F800000).to(gl.float32, bitcast=True)
    f1 = (gl.where(h == 0, s << 7, s >> 1) & 0x7F800000).to(gl.float32, bitcast=True)
    f0 = gl.convert_layout(f0.reshape([S, B * 16]), LS, assert_trivial=True)
    f1 = gl.convert_layout(f1.reshape([S, B * 16]), LS, assert_trivial=True)
    return f0, f1


@gluon.jit
def group_factors(s, h, LS: gl.constexpr):
    """FP8 blocks: pairs of factor words int64 [S, B, 1, 8] → float32 [S, 16 B] of group 0 and of group 1."""
    S: gl.constexpr = s.shape[0]
    B: gl.constexpr = s.shape[1]
    low = s.to(gl.int32)
    high = (s >> 32).to(gl.int32)
    f0 = gl.where(h == 0, low << 16, low & -0x10000).to(gl.float32, bitcast=True)
    f1 = gl.where(h == 0, high << 16, high & -0x10000).to(gl.float32, bitcast=True)
    f0 = gl.convert_layout(f0.reshape([S, B * 16]), LS, assert_trivial=True)
    f1 = gl.convert_layout(f1.reshape([S, B * 16]), LS, assert_trivial=True)
    return f0, f1
