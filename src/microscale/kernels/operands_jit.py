"""Packed words → the operands of ``tl.dot`` and ``tl.dot_scaled``, in plain Triton: what every portable GEMM shares.

Weights are on the left because the packed words (``kernels/layouts.py``) are the left operand's fragments: the reshapes
and permutes below name registers anew and move nothing (in the code for SM80 and SM120 no weight goes through shared
memory again once it is unpacked). Tokens arrive by plain pointers.

Within each group of 32 columns the weights meet the matrix unit in *fragment order*, a permutation of the columns, and
the tokens must follow. With column = 8 t + i, t in 0..3 and i in 0..7:

    bf16, QUADS    i = 4 s + 2 c + p    place 16 s + 4 t + 2 c + p       mma.sync: Triton gives a lane 4 neighbours
    bf16, else     i = 4 s + 2 c + p    place 16 s + 8 c + 2 t + p       as the instruction has it
    e4m3           i = 4 j + 2 a + b    place 16 j + 4 t + 2 b + (1 - a)

bf16 activations keep column order in memory: under ``QUADS`` they are fetched in fragment order, 8 bytes at a time, and
land in the operand's own swizzled layout; else they are permuted in registers. Quantised ones are stored in that order.

``bf16``: E2M1 and E4M3 become bf16 exactly, times their group's scale and 2**-64, which the epilogue gives back: group
scales up to 2**65 fit, and products with ordinary activations stay clear of float32's subnormals. NVFP4's scales of 16
columns leave six significant bits, the bf16 factors of FP8 blocks are rounded away once; the float32 scales of their
rows belong to the sums (``row_scales``).
``e4m3``: E2M1 becomes E4M3 * 2**6, and both operands keep their scales for the block-scaled matrix instruction.
``e2m1``, of NVFP4 and NVFP4: codes stay as they are, packed along K. A packed word's eight columns become the nibbles
2, 0, 6, 4, 3, 1, 7, 5, from the lowest bits up, and ``nvfp4_jit`` packs tokens in that order.

Inline assembly takes one word at a time (``pack=1``): which elements a larger pack would get is not specified, and
Triton moves broadcasts behind elementwise operations, assembly included.

``PLAIN`` replaces inline assembly, conversions, ``dot`` and ``dot_scaled`` by arithmetic that Triton's interpreter can
run (it truncates to bf16, multiplies bf16 as integers, and has no assembly).
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton
import triton.language as tl

from microscale.kernels.mxfp8_jit import decode_e4m3
from microscale.kernels.nvfp4_jit import decode_e2m1, decode_scales
from microscale.kernels.plain_jit import to_bf16

_UNSCALE: tl.constexpr = tl.constexpr(2.0**64)
_E2M1_IN_E4M3: tl.constexpr = tl.constexpr(2.0**6)
# The exponent byte of a group's scale as a bf16 factor: 2**(byte - 127) * 2**-64 * 2**126 for E2M1 (2**120 for E4M3).
_E2M1_EXPONENT: tl.constexpr = tl.constexpr(62)
_E4M3_EXPONENT: tl.constexpr = tl.constexpr(56)
# NVFP4's packed scale << 4 as a bf16 factor, twice: its exponents are biased by 10, and 127 - 10 + 62 are missing.
_NVFP4_FACTOR: tl.constexpr = tl.constexpr(179 * 0x00800080)
# The same for float32, of which it is the exponent's bits and three of the mantissa.
_E5M3_EXPONENT: tl.constexpr = tl.constexpr((127 - 10) << 3)
# Two bf16 numbers times two others; adding -0 keeps signed zeros. The plain bf16x2 product exists from SM90 on only.
_MULTIPLY: tl.constexpr = tl.constexpr("""{
    .reg .b32 z;
    mov.b32 z, 0x80008000;
    fma.rn.bf16x2 z, $2, $3, z;
    mov.b32 {$0, $1}, z;
}""")


# ---- registers: packed words to operands ----------------------------------------------------------------------------


@triton.jit
def scaled_pairs(words, factors, PLAIN: tl.constexpr):
    """uint32 words of two bf16 numbers, times words that hold one bf16 factor twice → bf16 ``[..., 2]``."""
    if PLAIN:
        factor = (factors & 0xFFFF0000).to(tl.float32, bitcast=True)
        low = (words << 16).to(tl.float32, bitcast=True) * factor
        high = (words & 0xFFFF0000).to(tl.float32, bitcast=True) * factor
        return to_bf16(tl.join(low, high), PLAIN)
    else:
        low, high = tl.inline_asm_elementwise(
            _MULTIPLY, "=h,=h,r,r", [words, factors], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
        )
        return tl.join(low, high)


@triton.jit
def word_bytes(words, PLAIN: tl.constexpr):
    """uint32 words → uint8 ``[..., 4]``, the lowest byte first."""
    if not PLAIN:
        # A copy that LLVM cannot look into: else it computes each byte of a converted word apart, 2.2 times the
        # instructions (SM120, 128 x 64 x 128). ptxas removes it.
        words = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], dtype=tl.uint32, is_pure=True, pack=1)
    b0 = words.to(tl.uint8)
    b1 = (words >> 8).to(tl.uint8)
    b2 = (words >> 16).to(tl.uint8)
    b3 = (words >> 24).to(tl.uint8)
    return tl.join(tl.join(b0, b2), tl.join(b1, b3)).reshape(words.shape + [4])


@triton.jit
def e2m1_to_bf16(q):
    """A packed MXFP4 word → the bf16 pairs of columns (0, 1), (2, 3), (4, 5), (6, 7), each E2M1 * 2**-126."""
    f0 = q & 0x81C081C0
    f1 = (q << 6) & 0x81C081C0
    f2 = ((q >> 6) | (q << 26)) & 0x81C081C0
    f3 = ((q << 4) & 0x81808180) | ((q >> 4) & 0x00400040)
    return f0, f1, f2, f3


@triton.jit
def e4m3_to_bf16(q):
    """A packed MXFP8 word → the bf16 pairs of columns (0, 1) and (2, 3), each E4M3 * 2**-120."""
    f0 = ((q >> 4) & 0x07F007F0) | (q & 0x80008000)
    f1 = ((q << 4) & 0x07F007F0) | ((q << 8) & 0x80008000)
    return f0, f1


@triton.jit
def e2m1_to_e4m3(q):
    """A packed MXFP4 word → two packed MXFP8 words, columns 0..3 and 4..7, each E2M1 * 2**-6 as E4M3."""
    down = q >> 2
    w0 = (q & 0x80008000) | ((q << 4) & 0x1C001C00) | (down & 0x00800080) | ((q << 2) & 0x001C001C)
    w1 = (((q >> 6) | (q << 26)) & 0x80008000) | (down & 0x1C001C00) | ((q >> 4) & 0x00800080)
    w1 = w1 | (q & 0x00180018) | ((q >> 8) & 0x00040004)
    return w0, w1


@triton.jit
def e2m1_to_nibbles(q):
    """A packed word of E2M1 → its codes as nibbles, columns 2, 0, 6, 4, 3, 1, 7, 5 from the lowest bits up."""
    rotated = (q >> 6) | (q << 26)
    nibbles = (q & 0x78077807) | (rotated & 0x80088008) | ((q >> 2) & 0x01700170)
    return nibbles | ((q >> 8) & 0x00800080) | ((q << 6) & 0x06000600)


@triton.jit
def _scale_bytes(s, R: tl.constexpr, T: tl.constexpr):
    """Scale words [R, T * 8] → [R, T, 8 = g, 4 = (G h)], one byte in each uint32."""
    return (s.reshape(R, T, 8, 1) >> (8 * tl.arange(0, 4))) & 0xFF


@triton.jit
def row_scales(scales_ptr, expert, row, rows, k):
    """The float32 scales of packed rows, which stand behind the scale words of their row tiles."""
    tile = row // 16
    if expert is not None:
        tile = expert.to(tl.int64) * (rows // 16) + tile
    at = ((tile + 1).to(tl.int64) * (tl.cdiv(k, 64) + 1) - 1) * 16 + row % 16
    return tl.load(scales_ptr + at, mask=row < rows, other=0).to(tl.float32, bitcast=True)


@triton.jit
def bf16_weights(
    q, s, BITS: tl.constexpr, ROW_SCALES: tl.constexpr, R: tl.constexpr, QUADS: tl.constexpr, PLAIN: tl.constexpr
):
    """Words [R, 128] (8 bits: [R, 128, 2 = G]) and scale words [R, 8] (ROW_SCALES: pairs of them, uint64) → bf16
    [16 R, 64], columns in fragment order."""
    if BITS == 4:
        if ROW_SCALES:
            shape: tl.constexpr = (R, 8, 2, 2, 4)  # t is 2 p and one more
            b = ((s.reshape(R, 8, 1) >> (8 * tl.arange(0, 8))) & 0xFF).to(tl.uint32)  # g (p v)
            factor = tl.broadcast_to((b * 0x00100010 + _NVFP4_FACTOR).reshape(R, 8, 2, 1, 4), shape)
        else:
            shape: tl.constexpr = (R, 8, 4, 4)
            b = _scale_bytes(s, R, 1)
            factor = tl.broadcast_to(((b + _E2M1_EXPONENT) * 0x00800080).reshape(R, 8, 1, 4), shape)
        f0, f1, f2, f3 = e2m1_to_bf16(q.reshape(shape))
        even = tl.join(scaled_pairs(f0, factor, PLAIN), scaled_pairs(f2, factor, PLAIN))
        odd = tl.join(scaled_pairs(f1, factor, PLAIN), scaled_pairs(f3, factor, PLAIN))
        w = tl.join(even, odd).reshape(R, 8, 4, 2, 2, 2, 2, 2)  # R g t G h p s c
        w = w.permute(0, 4, 1, 3, 6, 2, 7, 5) if QUADS else w.permute(0, 4, 1, 3, 6, 7, 2, 5)
    else:
        shape: tl.constexpr = (R, 8, 4, 2, 2, 2)
        if ROW_SCALES:
            b = ((s.reshape(R, 8, 1) >> (16 * tl.arange(0, 4))) & 0xFFFF).to(tl.uint32) * 0x00010001
        else:
            b = (_scale_bytes(s, R, 1) + _E4M3_EXPONENT) * 0x00800080
        factor = tl.broadcast_to(b.reshape(R, 8, 2, 2).permute(0, 1, 3, 2).reshape(R, 8, 1, 1, 2, 2), shape)
        f0, f1 = e4m3_to_bf16(q.reshape(shape))
        w = tl.join(scaled_pairs(f0, factor, PLAIN), scaled_pairs(f1, factor, PLAIN))  # R g t s h G p c
        w = w.permute(0, 4, 1, 5, 3, 2, 7, 6) if QUADS else w.permute(0, 4, 1, 5, 3, 7, 2, 6)
    return w.reshape(16 * R, 64)


@triton.jit
def e4m3_weights(q, s, BITS: tl.constexpr, R: tl.constexpr, T: tl.constexpr, PLAIN: tl.constexpr):
    """Words and scale words of R x T tiles → E4M3 [16 R, 64 T] in fragment order, and scale bytes [16 R, 2 T]."""
    b = _scale_bytes(s, R, T).to(tl.uint8)
    b = b.reshape(R, T, 8, 2, 2).permute(0, 4, 2, 1, 3).reshape(16 * R, 2 * T)  # R h g | T G
    if BITS == 4:
        w0, w1 = e2m1_to_e4m3(q.reshape(R, T, 8, 4, 2, 2))
        w = word_bytes(tl.join(w0, w1), PLAIN)  # R T g t G h j e
        return w.permute(0, 5, 2, 1, 4, 6, 3, 7).reshape(16 * R, 64 * T), b
    else:
        w = word_bytes(q.reshape(R, T, 2, 8, 4, 2, 2), PLAIN)  # R T G g t j h e
        return w.permute(0, 6, 3, 1, 2, 5, 4, 7).reshape(16 * R, 64 * T), b


@triton.jit
def e2m1_weights(q, s, R: tl.constexpr, T: tl.constexpr, PLAIN: tl.constexpr):
    """Words of R x T tiles and pairs of their scale words (uint64) → E2M1 [16 R, 32 T], two to a byte, and scales
    [16 R, 4 T] in E4M3 (PLAIN: float32)."""
    b = ((s.reshape(R, T, 8, 1) >> (8 * tl.arange(0, 8))) & 0xFF).to(tl.uint32).reshape(R, T, 8, 2, 2, 2)  # g p G h
    b = b.permute(0, 5, 2, 1, 4, 3).reshape(16 * R, 4 * T)  # R h g | T G p
    scales = ((b + _E5M3_EXPONENT) << 20).to(tl.float32, bitcast=True)
    w = word_bytes(e2m1_to_nibbles(q.reshape(R, T, 8, 4, 2, 2)), PLAIN)  # R T g t G h j
    w = w.permute(0, 5, 2, 1, 4, 3, 6).reshape(16 * R, 32 * T)
    return w, scales if PLAIN else scales.to(tl.float8e4nv)


@triton.jit
def bf16_tokens(x):
    """bf16 [M, K] in column order → fragment order."""
    M: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    return x.reshape(M, K // 32, 4, 2, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(M, K)


# ---- products --------------------------------------------------------------------------------------------------------


@triton.jit
def dot(w, x, acc, PLAIN: tl.constexpr):
    """acc [N, M] += W [N, K] @ x [M, K].T in bf16."""
    if PLAIN:
        return tl.dot(w.to(tl.float32), x.trans().to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(w, x.trans(), acc)


@triton.jit
def dot_scaled(w, w_scale, x, x_scale, acc, PLAIN: tl.constexpr):
    """acc [N, M] += W [N, K] @ x [M, K].T, both E4M3 under scales per 32 columns.

    Triton 3.8 and 3.9 read uint8 scales per 16 columns as E8M0 too, without a word: such scales are E4M3 (ROW_SCALES).
    """
    tl.static_assert(w.shape[1] == 32 * w_scale.shape[1], "uint8 scales are E8M0, one for 32 columns")
    if PLAIN:
        x = decode_e4m3(x, x_scale).trans()
        return tl.dot(decode_e4m3(w, w_scale), x, acc, input_precision="ieee")
    else:
        return tl.dot_scaled(w, w_scale, "e4m3", x.trans(), x_scale, "e4m3", acc)


@triton.jit
def dot_nvfp4(w, w_scale, x, x_words, acc, PLAIN: tl.constexpr):
    """acc [N, M] += W [N, K] @ x [M, K].T, both E2M1 under E4M3 scales per 16 columns; x's as one word of eight."""
    x_scale = ((x_words[:, None] >> (8 * tl.arange(0, 8))[None, :]) & 0xFF).to(tl.uint8)
    if PLAIN:
        x = decode_e2m1(x, decode_scales(x_scale)).trans()
        return tl.dot(decode_e2m1(w, w_scale), x, acc, input_precision="ieee")
    else:
        x_scale = x_scale.to(tl.float8e4nv, bitcast=True)
        return tl.dot_scaled(w, w_scale, "e2m1", x.trans(), x_scale, "e2m1", acc)


@triton.jit
def x_scales(words, left):
    """Scale words [M] of 128 columns → bytes [M, 4]. Of those past the ``left`` last columns nobody wrote a scale, and
    they might say NaN: 0 means 2**-127, times codes that read as zero."""
    groups = tl.minimum(left // 32, 4)
    words = words & tl.where(groups == 4, -1, (1 << (8 * groups)) - 1)
    return ((words[:, None] >> (8 * tl.arange(0, 4))[None, :]) & 0xFF).to(tl.uint8)


@triton.jit
def unscale(acc, BITS: tl.constexpr, ROW_SCALES: tl.constexpr, MX: tl.constexpr):
    if MX:
        return acc * _E2M1_IN_E4M3 if BITS == 4 and not ROW_SCALES else acc
    else:
        return acc * _UNSCALE
