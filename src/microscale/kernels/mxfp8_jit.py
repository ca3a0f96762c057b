"""Jit code of MXFP8 activations: encode by the OCP MX rules as ``formats`` does, in the order that the GEMMs read.

``quantise`` serves both uses: the tokens before the first GEMM (``quantise_tokens``) and the epilogue of the first for
the second. ``PLAIN`` means arithmetic that Triton's interpreter can run; see ``grouped_jit`` for fragment order.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_e4m3(codes, scales):
    """E4M3 codes [N, K] and scale bytes [N, K / 32] → float32 [N, K]."""
    N: tl.constexpr = codes.shape[0]
    K: tl.constexpr = codes.shape[1]
    c = codes.to(tl.uint32)
    value = (((c & 0x7F) << 20) | ((c & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    b = scales.to(tl.uint32)
    bits = tl.where(b == 0, 0x00400000, tl.where(b == 255, 0x7FC00000, b << 23))
    scale = bits.to(tl.float32, bitcast=True)
    return (value.reshape(N, K // 32, 32) * scale.reshape(N, K // 32, 1)).reshape(N, K)


@triton.jit
def round_e4m3(v, PLAIN: tl.constexpr):
    """float32 → the nearest E4M3 code, ties to even, saturating at 448."""
    v = tl.minimum(tl.maximum(v, -448.0), 448.0)
    if PLAIN:
        bits = v.to(tl.uint32, bitcast=True)
        sign = (bits >> 24) & 0x80
        bits = bits & 0x7FFFFFFF
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # the exponent's bias drops from 127 to 7
        # Below 2**-6 a code is a multiple of 2**-9, the last place of float32 at 2**14.
        small = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        return (tl.where(bits < 0x3C800000, small, normal) | sign).to(tl.uint8)
    else:
        return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def quantise(v, PLAIN: tl.constexpr):
    """float32 [M, G, 32] → E4M3 codes [M, G * 32] in fragment order and scale bytes [M, G], by the OCP MX rules.

    As ``formats``: a group with a NaN or an infinity gets scale byte 255 and codes 0, so it reads as NaN throughout.
    """
    M: tl.constexpr = v.shape[0]
    G: tl.constexpr = v.shape[1]
    exponent = (v.to(tl.uint32, bitcast=True) & 0x7FFFFFFF).to(tl.int32, bitcast=True) >> 23
    largest = tl.max(exponent, axis=2)
    finite = largest < 255
    scale = tl.where(finite, tl.maximum(largest - 8, 0), 255)
    factor = ((254 - scale) << 23).to(tl.float32, bitcast=True).reshape(M, G, 1)
    v = tl.where(finite.reshape(M, G, 1), v, 0.0) * tl.where(finite.reshape(M, G, 1), factor, 0.0)
    codes = round_e4m3(v, PLAIN).reshape(M, G, 4, 2, 2, 2)  # M G t j a b
    a0, a1 = tl.split(codes.permute(0, 1, 3, 2, 5, 4))
    return tl.join(a1, a0).reshape(M, G * 32), scale.to(tl.uint8)


@triton.jit(do_not_specialize=["tokens"])
def quantise_tokens(
    x_ptr,  # bf16 [tokens, k]
    codes_ptr,  # uint8 [tokens, stride_codes], fragment order
    scales_ptr,  # uint8 [tokens, stride_codes / 32]
    tokens, k, stride_x, stride_codes, PLAIN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The tokens in MXFP8. Columns past ``k`` become zeros under scale byte 0."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    group = tl.program_id(1) * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)
    at = row.to(tl.int64)[:, None]
    ok = (row < tokens)[:, None] & (column < k)[None, :]
    x = tl.load(x_ptr + at * stride_x + column[None, :], mask=ok, other=0.0)
    # bf16 is the upper half of float32; so written, the interpreter gets subnormals right too.
    x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    codes, scales = quantise(x.reshape(ROWS, COLUMNS // 32, 32), PLAIN)
    ok = (row < tokens)[:, None] & (column < stride_codes)[None, :]
    tl.store(codes_ptr + at * stride_codes + column[None, :], codes, mask=ok)
    ok = (row < tokens)[:, None] & (group < stride_codes // 32)[None, :]
    tl.store(scales_ptr + at * (stride_codes // 32) + group[None, :], scales, mask=ok)
