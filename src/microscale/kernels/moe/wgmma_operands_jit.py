"""Packed words → the left operand of ``wgmma``, in registers: MXFP4 as bf16 or E4M3, MXFP8 and NVFP4 as bf16. Each
group's scale is in its weights.

``wgmma`` sums over all of K, so a scale per group of 32 must be part of the weight. The words are those of
``kernels/layouts.py``: a lane's words are its fragments already, and no conversion crosses lanes. Texts are PTX
constants: a test executes them, word for word, against the format's decoder.

bf16: weight * scale * 2**-64, exact, against activations that carry 2**64 (``fragments_jit``). NVFP4's scales of 16
columns likewise; the float32 scales of its rows belong to the sums.

E4M3: weight * scale / 2**(P - 6), where 2**P is the largest scale of the weight's row (``Packed.peaks``); the row's
factor is multiplied in once, in float32. Codes have one bit of mantissa, so 12 octaves are exact: 6 * 2**6 is E4M3's
384, 0.5 * 2**-5 its smallest normal number. A group more than 11 octaves below its row's peak reads as if it were 11
below: an error of less than 2**-10 of the row's largest weight. Eight codes are eight choices from a table of eight
bytes that already holds the group's exponent (``prmt``).

The bits of a word (see the layout) become the selectors of ``prmt`` with two shifts: fields 1, 0, 3, 2 of half-word p
stand in its nibbles 0, 1, 2, 3. Signs go to bits 7, 15, 23, 31 by one product: of w >> 2, bit 7 stays, bit 13 moves by
2, bit 19 by 12, bit 9 by 14; no sum of the others reaches those four bits. Half-word 1 is half-word 0 after half a
turn.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from microscale.kernels.fragments_jit import MXFP4_TO_BF16, MXFP8_TO_BF16, nvfp4_factors
from microscale.kernels.gluon_names import reinterpret
from microscale.kernels.numbers import PEAK_BIAS

_MXFP4_TO_WORDS: tl.constexpr = tl.constexpr(MXFP4_TO_BF16)
_MXFP8_TO_WORDS: tl.constexpr = tl.constexpr(MXFP8_TO_BF16)
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
# The same for MXFP8, whose constant is 120: 56.
MXFP8_SCALE_WORDS = SCALE_WORDS.replace("0x3E3E3E3E", "0x38383838")
_MXFP8_SCALE_WORDS: tl.constexpr = tl.constexpr(MXFP8_SCALE_WORDS)
# Four scale bytes ($8) and the peaks of their rows ($9: h = 0, $10: h = 1, twice each) → the tables of v = 0 to 3:
# bytes 0 to 3 in the even output, 4 to 7 in the odd one. s = b - P + 11, at least 0, is the exponent field of the
# smallest code less one.
TABLES = """{
    .reg .b32 a, b, s, m, z;
    mov.b32 m, 0x40004000;
    mov.b32 z, 0;
    prmt.b32 a, $8, z, 0x4240;
    prmt.b32 b, $8, z, 0x4341;
    add.u32 a, a, $9;
    add.u32 b, b, $10;
    max.s16x2 a, a, m;
    max.s16x2 b, b, m;
    prmt.b32 s, a, z, 0x4440;
    mad.lo.u32 $0, s, 0x08080800, 0x14100800;
    mad.lo.u32 $1, s, 0x08080808, 0x24201C18;
    prmt.b32 s, b, z, 0x4440;
    mad.lo.u32 $2, s, 0x08080800, 0x14100800;
    mad.lo.u32 $3, s, 0x08080808, 0x24201C18;
    prmt.b32 s, a, z, 0x4442;
    mad.lo.u32 $4, s, 0x08080800, 0x14100800;
    mad.lo.u32 $5, s, 0x08080808, 0x24201C18;
    prmt.b32 s, b, z, 0x4442;
    mad.lo.u32 $6, s, 0x08080800, 0x14100800;
    mad.lo.u32 $7, s, 0x08080808, 0x24201C18;
}"""
_TABLES: tl.constexpr = tl.constexpr(TABLES)
# One word ($4) and its table ($5, $6) → magnitudes of half-words 0 and 1 ($0, $1), and their signs among other bits
# ($2, $3). lop3 0xEA is (a & b) | c.
MXFP4_TO_E4M3 = """{
    .reg .b32 a, b, c;
    shr.u32 a, $4, 2;
    and.b32 b, a, 0x01700170;
    lop3.b32 b, $4, 0x70077007, b, 0xEA;
    shl.b32 c, $4, 6;
    lop3.b32 b, c, 0x06000600, b, 0xEA;
    prmt.b32 $0, $5, $6, b;
    shr.u32 b, b, 16;
    prmt.b32 $1, $5, $6, b;
    and.b32 a, a, 0x00082280;
    mul.lo.u32 $2, a, 0x5005;
    shf.r.wrap.b32 c, $4, $4, 18;
    and.b32 c, c, 0x00082280;
    mul.lo.u32 $3, c, 0x5005;
}"""
_MXFP4_TO_E4M3: tl.constexpr = tl.constexpr(MXFP4_TO_E4M3)
# Signs into magnitudes. Each operand comes four times, once for each byte of the result.
SIGNED = "lop3.b32 $0, $5, 0x80808080, $1, 0xEA;"
_SIGNED: tl.constexpr = tl.constexpr(SIGNED)
_PEAK_BIAS: tl.constexpr = tl.constexpr(PEAK_BIAS)


@gluon.jit
def row_peaks(peaks_ptr, at, L4: gl.constexpr, FP8: gl.constexpr):
    """The peaks of the rows of each lane, twice in a word: h = 0 and h = 1. Not read for bf16."""
    LQ: gl.constexpr = gl.SliceLayout(3, L4)
    LP: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LQ))
    if FP8:
        words = gl.load(peaks_ptr + gl.convert_layout(at, LP, assert_trivial=True))
        low = (words & 0xFFFF) * 0x10001
        high = ((words >> 16) & 0xFFFF) * 0x10001
        return low[:, None, None], high[:, None, None]
    else:
        return at, at


@gluon.jit
def row_factor(peaks_ptr, row):
    """The float32 factor of packed rows whose weights are E4M3 (0 for a peak under 2**-120)."""
    word = gl.load(peaks_ptr + row // 16 * 8 + row % 8)
    peak = _PEAK_BIAS - ((word >> (row // 8 % 2 * 16)) & 0xFFFF)
    return (gl.maximum(peak - 6, 0) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _of_pair(v, x0, x1, x2, x3):
    """``x`` of pair v. v lies in registers: the choice is made at compile time."""
    return gl.where(v == 0, x0, gl.where(v == 1, x1, gl.where(v == 2, x2, x3)))


@gluon.jit
def convert(w_tile, s_tile, peaks, L4: gl.constexpr, FP8: gl.constexpr):
    """One K tile in shared memory, all but the last operation: bf16 pairs of fields 0 to 3 and their scales, or
    magnitudes and signs.

    The last operation (``operand``) writes the registers that ``wgmma`` reads. Unless two operands alternate it belongs
    after the wait for the previous ``wgmma`` (before it, ptxas serialises them all: warning C7513).
    """
    LQ: gl.constexpr = gl.SliceLayout(3, L4)
    q = w_tile.load(LQ)
    if s_tile.shape[0] != w_tile.shape[0]:  # NVFP4: each lane has one of two words
        f0, f1, f2, f3 = _e2m1_pairs(q)
        return f0, f1, f2, f3, _nvfp4_scales(s_tile, L4)
    else:
        s = s_tile.load(gl.SliceLayout(1, gl.SliceLayout(2, LQ)))[:, None, None]
        v = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LQ)))[None, None, :]
        if FP8:
            a0, b0, a1, b1, a2, b2, a3, b3 = gl.inline_asm_elementwise(
                _TABLES, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r", [s, peaks[0], peaks[1]],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
                is_pure=True, pack=1,
            )  # fmt: skip
            return gl.inline_asm_elementwise(
                _MXFP4_TO_E4M3, "=&r,=&r,=&r,=&r,r,r,r", [q, _of_pair(v, a0, a1, a2, a3), _of_pair(v, b0, b1, b2, b3)],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            f0, f1, f2, f3 = _e2m1_pairs(q)
            s0, s1, s2, s3 = gl.inline_asm_elementwise(
                _SCALE_WORDS, "=&r,=&r,=&r,=&r,r", [s],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
            )  # fmt: skip
            return f0, f1, f2, f3, _of_pair(v, s0, s1, s2, s3)


@gluon.jit
def _e2m1_pairs(q):
    return gl.inline_asm_elementwise(
        _MXFP4_TO_WORDS, "=&r,=&r,=&r,=&r,r", [q],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _halves(L4):
    """The lanes of ``L4`` as [8 R, 2 = p, 2, 4 = v]: t is 2 p and one more."""
    return gl.BlockedLayout([1, 1, 1, 4], [8, 2, 2, 1], [L4.warps_per_cta[0], 1, 1, 1], [3, 2, 1, 0])


@gluon.jit
def _nvfp4_scales(s_tile, L4: gl.constexpr):
    """Scale words [8 R * 2] in shared memory → the factors of each lane's words, [8 R, t, v]."""
    N: gl.constexpr = s_tile.shape[0] // 2
    LH: gl.constexpr = _halves(L4)
    pairs = reinterpret(s_tile, gl.int32, [N, 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    s = pairs.load(gl.SliceLayout(2, gl.SliceLayout(3, LH)))[:, :, None, None]
    v = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LH))))[None, None, None, :]
    factors = nvfp4_factors(s, v) + gl.zeros([N, 2, 2, 4], gl.int32, LH)
    return gl.convert_layout(factors.reshape([N, 4, 4]), gl.SliceLayout(3, L4), assert_trivial=True)


@gluon.jit
def _scaled(f, scale, z):
    """bf16 pairs times their scale: [8 R, t, v] words → [8 R, t, v, p] numbers."""
    return gl.inline_asm_elementwise(
        "mul.bf16x2 $0, $1, $3;", "=r,r,r,r,r", [f[:, :, :, None] + z, scale[:, :, :, None] + z],
        dtype=gl.bfloat16, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def _signed(magnitude, sign, z):
    """E4M3 bytes with their signs: [8 R, t, v] words → [8 R, t, v, e] numbers."""
    return gl.inline_asm_elementwise(
        _SIGNED, "=r,r,r,r,r,r,r,r,r", [magnitude[:, :, :, None] + z, sign[:, :, :, None] + z],
        dtype=gl.float8e4nv, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def operand(words, BM: gl.constexpr, L4: gl.constexpr, LA: gl.constexpr, FP8: gl.constexpr):
    """What ``convert`` left → the left operand [BM, 64], columns in the order of the prepared tokens."""
    if FP8:
        z = gl.zeros([BM // 2, 4, 4, 4], gl.int32, L4)
        a = gl.join(_signed(words[0], words[2], z), _signed(words[1], words[3], z))
        a = a.reshape([BM // 16, 8, 4, 2, 2, 4, 2]).permute([0, 4, 1, 3, 6, 2, 5])  # R g t G h e p → R h g | G p t e
    else:
        z = gl.zeros([BM // 2, 4, 4, 2], gl.int32, L4)
        low = gl.join(_scaled(words[0], words[4], z), _scaled(words[1], words[4], z))
        high = gl.join(_scaled(words[2], words[4], z), _scaled(words[3], words[4], z))
        a = gl.join(low, high).reshape([BM // 16, 8, 4, 2, 2, 2, 2, 2])  # R g t G h p c j
        a = a.permute([0, 4, 1, 3, 7, 6, 2, 5])  # R h g | G j c t p
    return gl.convert_layout(a.reshape([BM, 64]), LA, assert_trivial=True)


@gluon.jit
def convert_mxfp8(w_low, w_high, s_tile, L4: gl.constexpr):
    """One K tile of MXFP8, a group of 32 columns in each of two tiles, all but the last operation: bf16 pairs of
    columns (0, 1) and (2, 3) of each word, and their scales, of group 0 and then of group 1."""
    LQ: gl.constexpr = gl.SliceLayout(3, L4)
    s = s_tile.load(gl.SliceLayout(1, gl.SliceLayout(2, LQ)))[:, None, None]
    h = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LQ)))[None, None, :] % 2  # a lane's words are (j h)
    low0, low1 = _mxfp8_pairs(w_low.load(LQ))
    high0, high1 = _mxfp8_pairs(w_high.load(LQ))
    s0, s1, s2, s3 = gl.inline_asm_elementwise(
        _MXFP8_SCALE_WORDS, "=&r,=&r,=&r,=&r,r", [s],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return low0, low1, gl.where(h == 0, s0, s1), high0, high1, gl.where(h == 0, s2, s3)


@gluon.jit
def _mxfp8_pairs(q):
    return gl.inline_asm_elementwise(
        _MXFP8_TO_WORDS, "=&r,=&r,r", [q], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def operand_mxfp8(words, BM: gl.constexpr, L4: gl.constexpr, LA: gl.constexpr):
    """What ``convert_mxfp8`` left → the left operand [BM, 64], columns in the order of the prepared tokens."""
    z = gl.zeros([BM // 2, 4, 4, 2], gl.int32, L4)
    low = gl.join(_scaled(words[0], words[2], z), _scaled(words[1], words[2], z))
    high = gl.join(_scaled(words[3], words[5], z), _scaled(words[4], words[5], z))
    a = gl.join(low, high).reshape([BM // 16, 8, 4, 2, 2, 2, 2, 2])  # R g t j h p c G
    a = a.permute([0, 4, 1, 7, 3, 6, 2, 5])  # R h g | G j c t p
    return gl.convert_layout(a.reshape([BM, 64]), LA, assert_trivial=True)
