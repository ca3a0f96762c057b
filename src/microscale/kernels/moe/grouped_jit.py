"""Jit code of the grouped expert GEMMs, in plain Triton: for every GPU from Ampere on and batches beyond the smallest.

One program computes ``BLOCK_N`` packed weight rows times one tile of up to ``BLOCK_M`` pairs of one expert:

    acc [BLOCK_N, BLOCK_M] = W [BLOCK_N, BLOCK_K] @ x[rows].T [BLOCK_K, BLOCK_M]      summed over K

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
scales up to 2**65 fit, and products with ordinary activations stay clear of float32's subnormals.
``e4m3``: E2M1 becomes E4M3 * 2**6, and both operands keep their scales for the block-scaled matrix instruction.

Inline assembly takes one word at a time (``pack=1``): which elements a larger pack would get is not specified, and
Triton moves broadcasts behind elementwise operations, assembly included.

``PLAIN`` replaces inline assembly, conversions, ``dot`` and ``dot_scaled`` by arithmetic that Triton's interpreter can
run (it truncates to bf16, multiplies bf16 as integers, and knows no assembly).
"""

from __future__ import annotations

import triton
import triton.language as tl

from microscale.kernels.moe.mxfp8_jit import decode_e4m3, quantise
from microscale.kernels.plain_jit import to_bf16

SWIGLU: tl.constexpr = tl.constexpr(0)
GELU: tl.constexpr = tl.constexpr(1)

_UNSCALE: tl.constexpr = tl.constexpr(2.0**64)
_E2M1_IN_E4M3: tl.constexpr = tl.constexpr(2.0**6)
# The exponent byte of a group's scale as a bf16 factor: 2**(byte - 127) * 2**-64 * 2**126 for E2M1 (2**120 for E4M3).
_E2M1_EXPONENT: tl.constexpr = tl.constexpr(62)
_E4M3_EXPONENT: tl.constexpr = tl.constexpr(56)
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
def _scale_bytes(s, R: tl.constexpr, T: tl.constexpr):
    """Scale words [R, T * 8] → [R, T, 8 = g, 4 = (G h)], one byte in each uint32."""
    return (s.reshape(R, T, 8, 1) >> (8 * tl.arange(0, 4))) & 0xFF


@triton.jit
def _bf16_weights(q, s, BITS: tl.constexpr, R: tl.constexpr, QUADS: tl.constexpr, PLAIN: tl.constexpr):
    """Words [R, 128] (MXFP8: [R, 128, 2 = G]) and scale words [R, 8] → bf16 [16 R, 64], columns in fragment order."""
    b = _scale_bytes(s, R, 1)
    if BITS == 4:
        shape: tl.constexpr = (R, 8, 4, 4)
        factor = tl.broadcast_to(((b + _E2M1_EXPONENT) * 0x00800080).reshape(R, 8, 1, 4), shape)
        f0, f1, f2, f3 = e2m1_to_bf16(q.reshape(shape))
        even = tl.join(scaled_pairs(f0, factor, PLAIN), scaled_pairs(f2, factor, PLAIN))
        odd = tl.join(scaled_pairs(f1, factor, PLAIN), scaled_pairs(f3, factor, PLAIN))
        w = tl.join(even, odd).reshape(R, 8, 4, 2, 2, 2, 2, 2)  # R g t G h p s c
        w = w.permute(0, 4, 1, 3, 6, 2, 7, 5) if QUADS else w.permute(0, 4, 1, 3, 6, 7, 2, 5)
    else:
        shape: tl.constexpr = (R, 8, 4, 2, 2, 2)
        b = b.reshape(R, 8, 2, 2).permute(0, 1, 3, 2).reshape(R, 8, 1, 1, 2, 2)
        factor = tl.broadcast_to((b + _E4M3_EXPONENT) * 0x00800080, shape)
        f0, f1 = e4m3_to_bf16(q.reshape(shape))
        w = tl.join(scaled_pairs(f0, factor, PLAIN), scaled_pairs(f1, factor, PLAIN))  # R g t s h G p c
        w = w.permute(0, 4, 1, 5, 3, 2, 7, 6) if QUADS else w.permute(0, 4, 1, 5, 3, 7, 2, 6)
    return w.reshape(16 * R, 64)


@triton.jit
def _e4m3_weights(q, s, BITS: tl.constexpr, R: tl.constexpr, T: tl.constexpr, PLAIN: tl.constexpr):
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
def _bf16_tokens(x):
    """bf16 [M, K] in column order → fragment order."""
    M: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    return x.reshape(M, K // 32, 4, 2, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(M, K)


# ---- one tile of a grouped GEMM -------------------------------------------------------------------------------------


@triton.jit
def _dot(w, x, acc, PLAIN: tl.constexpr):
    """acc [N, M] += W [N, K] @ x [M, K].T in bf16."""
    if PLAIN:
        return tl.dot(w.to(tl.float32), x.trans().to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(w, x.trans(), acc)


@triton.jit
def _dot_scaled(w, w_scale, x, x_scale, acc, PLAIN: tl.constexpr):
    """acc [N, M] += W [N, K] @ x [M, K].T, both E4M3 under scales per 32 columns."""
    if PLAIN:
        x = decode_e4m3(x, x_scale).trans()
        return tl.dot(decode_e4m3(w, w_scale), x, acc, input_precision="ieee")
    else:
        return tl.dot_scaled(w, w_scale, "e4m3", x.trans(), x_scale, "e4m3", acc)


@triton.jit
def _locate(tiles_ptr, offsets_ptr, blocks_n, BLOCK_M: tl.constexpr):
    """This program's expert (-1: none), block of rows, first place and number of pairs.

    Programs go through all tiles of an expert before the next block of rows: weights leave memory once, then come from
    the L2 cache.
    """
    pid = tl.program_id(0)
    expert = tl.load(tiles_ptr + pid // blocks_n * 4)
    first = tl.load(tiles_ptr + pid // blocks_n * 4 + 3)
    begin = tl.load(offsets_ptr + tl.maximum(expert, 0))
    end = tl.load(offsets_ptr + tl.maximum(expert, 0) + 1)
    tiles = tl.maximum(tl.cdiv(end - begin, BLOCK_M), 1)
    local = pid - first * blocks_n
    start = begin + local % tiles * BLOCK_M
    return expert, local // tiles, start, tl.minimum(end - start, BLOCK_M)


@triton.jit
def _rows_of(order_ptr, start, count, first, TOP_K: tl.constexpr, PART_M: tl.constexpr):
    """The rows of x for columns ``first ..`` of a tile: tokens of the pairs, or (``TOP_K`` 0) the places themselves.

    Columns past the tile's pairs repeat its last pair; their results are not stored.
    """
    place = start + tl.minimum(first + tl.arange(0, PART_M), count - 1)
    if TOP_K == 0:
        return place.to(tl.int64)
    else:
        return (tl.load(order_ptr + place) // TOP_K).to(tl.int64)


@triton.jit
def _accumulate(
    x_ptr,  # bf16 [.., k], or E4M3 codes in fragment order
    xs_ptr,  # E4M3: scale words [.., ceil(k / 128)]
    stride_x,
    words_ptr,
    scales_ptr,
    order_ptr,
    expert,
    block_n,
    start,
    count,
    rows,
    k,
    TOP_K: tl.constexpr,
    BITS: tl.constexpr,
    MX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART_M: tl.constexpr,
    QUADS: tl.constexpr,
    STAGES: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """The products of one tile: a tuple of float32 [BLOCK_N, PART_M]. Past ``k`` both sides are read as zero.

    Columns are computed in parts of ``PART_M``: where all warps lie along the rows each warp unpacks only its own
    weights. A single 128 x 64 product on mma.sync has 2 x 2 warps, and the weights cross shared memory to be shared.
    """
    R: tl.constexpr = BLOCK_N // 16
    T: tl.constexpr = BLOCK_K // 64
    WORDS: tl.constexpr = 32 * BITS  # of one tile
    SPLIT: tl.constexpr = BITS == 8 and not MX  # one load per group, so that warps lie along the rows here too
    LOAD: tl.constexpr = 128 if SPLIT else T * WORDS
    k_tiles = tl.cdiv(k, 64)
    # Rows past the end read the last row tile again; their results are not stored.
    row_tile = tl.minimum(block_n * R + tl.arange(0, R), rows // 16 - 1)
    tile = (expert.to(tl.int64) * (rows // 16) + row_tile) * k_tiles
    word = tl.arange(0, LOAD)
    scale = tl.arange(0, T * 8)
    column = tl.arange(0, BLOCK_K)
    if QUADS and not MX:
        column = column // 32 * 32 + column // 4 % 4 * 8 + column // 16 % 2 * 4 + column % 4
    word_ptrs = words_ptr + tile[:, None] * WORDS + word[None, :]
    scale_ptrs = scales_ptr + tile[:, None] * 8 + scale[None, :]
    acc = ()
    x_ptrs = ()
    xs_ptrs = ()
    for part in tl.static_range(BLOCK_M // PART_M):
        x_rows = _rows_of(order_ptr, start, count, part * PART_M, TOP_K, PART_M)
        acc = acc + (tl.zeros([BLOCK_N, PART_M], tl.float32),)
        x_ptrs = x_ptrs + (x_ptr + x_rows[:, None] * stride_x + column[None, :],)
        xs_ptrs = xs_ptrs + (xs_ptr + x_rows * tl.cdiv(k, 128),)
    for t in tl.range(0, k_tiles, T, num_stages=STAGES):
        q = tl.load(word_ptrs + t * WORDS, mask=(word < (k_tiles - t) * WORDS)[None, :], other=0)
        if SPLIT:
            q = tl.join(q, tl.load(word_ptrs + t * WORDS + 128))
        s = tl.load(scale_ptrs + t * 8, mask=(scale < (k_tiles - t) * 8)[None, :], other=0)
        q = q.to(tl.uint32, bitcast=True)
        s = s.to(tl.uint32, bitcast=True)
        ws = s
        if MX:
            w, ws = _e4m3_weights(q, s, BITS, R, T, PLAIN)
        else:
            w = _bf16_weights(q, s, BITS, R, QUADS, PLAIN)
        sums = ()
        for part in tl.static_range(BLOCK_M // PART_M):
            x = tl.load(x_ptrs[part] + t * 64, mask=(column < k - t * 64)[None, :], other=0)
            if MX:
                xs = _x_scales(tl.load(xs_ptrs[part] + t // 2), k - t * 64)
                sums = sums + (_dot_scaled(w, ws, x, xs, acc[part], PLAIN),)
            else:
                sums = sums + (_dot(w, x if QUADS else _bf16_tokens(x), acc[part], PLAIN),)
        acc = sums
    return acc


@triton.jit
def _x_scales(words, left):
    """Scale words [M] of 128 columns → bytes [M, 4]. Of those past the ``left`` last columns nobody wrote a scale, and
    they might say NaN: 0 means 2**-127, times codes that read as zero."""
    groups = tl.minimum(left // 32, 4)
    words = words & tl.where(groups == 4, -1, (1 << (8 * groups)) - 1)
    return ((words[:, None] >> (8 * tl.arange(0, 4))[None, :]) & 0xFF).to(tl.uint8)


@triton.jit
def _unscale(acc, BITS: tl.constexpr, MX: tl.constexpr):
    if MX:
        return acc * _E2M1_IN_E4M3 if BITS == 4 else acc
    else:
        return acc * _UNSCALE


@triton.jit
def _gated(g, up, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The gated activation in float32; a NaN stays a NaN. gelu_tanh(g) = g sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3))."""
    if GATE == GELU:
        return g / (1.0 + tl.exp(-1.5957691216057308 * (g + 0.044715 * g * g * g))) * up
    else:
        g = tl.minimum(g, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return g / (1.0 + tl.exp(-ALPHA * g)) * (up + 1.0)


@triton.jit
def gate_up(
    x_ptr, xs_ptr, words_ptr, scales_ptr, bias_ptr,
    h_ptr,  # [pairs, ..] in sorted order: bf16, or E4M3 codes in fragment order
    hs_ptr,  # E4M3: scale bytes [pairs, 4 * ceil(units / 128)]
    tiles_ptr, offsets_ptr, order_ptr, rows, k, stride_x, stride_h,
    TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BITS: tl.constexpr, MX: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PART_M: tl.constexpr,
    QUADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gather, first GEMM, bias and gate: ``h[place] = gate(x[token of place] @ gate_up[expert].T + bias)``."""
    expert, block_n, start, count = _locate(tiles_ptr, offsets_ptr, tl.cdiv(rows, BLOCK_N), BLOCK_M)
    if expert < 0:
        return
    parts = _accumulate(
        x_ptr, xs_ptr, stride_x, words_ptr, scales_ptr, order_ptr, expert, block_n, start, count, rows, k,
        TOP_K, BITS, MX, BLOCK_N, BLOCK_M, BLOCK_K, PART_M, QUADS, STAGES, PLAIN,
    )  # fmt: skip
    UNITS: tl.constexpr = BLOCK_N // 2
    unit = (block_n * UNITS + tl.arange(0, UNITS))[None, :]
    group = (block_n * (UNITS // 32) + tl.arange(0, UNITS // 32))[None, :]
    row = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    for part in tl.static_range(BLOCK_M // PART_M):
        acc = _unscale(parts[part], BITS, MX)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert.to(tl.int64) * rows + row, mask=row < rows, other=0.0)
            acc += bias.to(tl.float32)[:, None]
        pairs = acc.reshape(BLOCK_N // 16, 2, 8, PART_M).permute(0, 2, 3, 1).reshape(UNITS, PART_M, 2)
        g, up = tl.split(pairs)
        h = _gated(g, up, GATE, ALPHA, LIMIT).trans()  # [PART_M, UNITS]
        m = part * PART_M + tl.arange(0, PART_M)
        place = (start + m).to(tl.int64)[:, None]
        ok = (m < count)[:, None]
        if MX:
            # Units past the end are whole groups, because a group never straddles it: they are not stored.
            codes, scales = quantise(h.reshape(PART_M, UNITS // 32, 32), PLAIN)
            tl.store(h_ptr + place * stride_h + unit, codes, mask=ok & (unit < rows // 2))
            stride_hs = tl.cdiv(rows // 2, 128) * 4
            tl.store(hs_ptr + place * stride_hs + group, scales, mask=ok & (group < rows // 64))
        else:
            tl.store(h_ptr + place * stride_h + unit, to_bf16(h, PLAIN), mask=ok & (unit < rows // 2))


@triton.jit
def down(
    h_ptr, hs_ptr, words_ptr, scales_ptr, bias_ptr,
    parts_ptr,  # bf16 [pairs, rows] in pair order
    weights_ptr,  # float32 [pairs]
    tiles_ptr, offsets_ptr, order_ptr, rows, k, stride_h,
    HAS_BIAS: tl.constexpr, BITS: tl.constexpr, MX: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PART_M: tl.constexpr,
    QUADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Second GEMM, bias and routing weight: ``parts[pair] = weight[pair] * (h[place] @ down[expert].T + bias)``."""
    expert, block_n, start, count = _locate(tiles_ptr, offsets_ptr, tl.cdiv(rows, BLOCK_N), BLOCK_M)
    if expert < 0:
        return
    parts = _accumulate(
        h_ptr, hs_ptr, stride_h, words_ptr, scales_ptr, order_ptr, expert, block_n, start, count, rows, k,
        0, BITS, MX, BLOCK_N, BLOCK_M, BLOCK_K, PART_M, QUADS, STAGES, PLAIN,
    )  # fmt: skip
    row = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    for part in tl.static_range(BLOCK_M // PART_M):
        acc = _unscale(parts[part], BITS, MX)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert.to(tl.int64) * rows + row, mask=row < rows, other=0.0)
            acc += bias.to(tl.float32)[:, None]
        m = part * PART_M + tl.arange(0, PART_M)
        pair = tl.load(order_ptr + start + tl.minimum(m, count - 1))
        y = acc.trans() * tl.load(weights_ptr + pair)[:, None]
        ok = (m < count)[:, None] & (row < rows)[None, :]
        tl.store(parts_ptr + pair.to(tl.int64)[:, None] * rows + row[None, :], to_bf16(y, PLAIN), mask=ok)
