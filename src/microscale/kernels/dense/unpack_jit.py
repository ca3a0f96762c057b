"""Jit code that turns packed fragments back into a bf16 matrix, for cuBLAS. Bound by memory."""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton
import triton.language as tl

from microscale.kernels.operands_jit import e2m1_to_bf16, e4m3_to_bf16
from microscale.kernels.plain_jit import to_bf16

_E2M1: tl.constexpr = tl.constexpr(2.0**126)
_E4M3: tl.constexpr = tl.constexpr(2.0**120)
_FACTOR: tl.constexpr = tl.constexpr(2.0**-56)  # what those of FP8 blocks carry, see ``kernels/layouts.py``
_E5M3_BITS: tl.constexpr = tl.constexpr((127 - 10) << 23)


@triton.jit
def _pair(words, FACTOR: tl.constexpr):
    """uint32 words of two bf16 numbers → float32 ``[..., 2]`` times a constant, exact."""
    low = (words << 16).to(tl.float32, bitcast=True)
    high = (words & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.join(low, high) * FACTOR


@triton.jit
def unpack(
    words_ptr,  # uint32 [rows / 16, k_tiles, 32 * BITS]
    scales_ptr,  # GROUPS: uint32 [rows / 16, k_tiles, 8]; ROW_SCALES: [rows / 16, k_tiles + 1, 16]; else float32 [rows]
    out_ptr,  # bf16 [rows, k]
    k,
    k_tiles,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    TILES: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Grid: (row tiles, blocks of TILES K tiles). ``kernels/layouts.py`` has the map of the words.

    Scales of groups are powers of two, and the copy is exact; with a float32 scale a row (FP8, ROW_SCALES) it is
    rounded to bf16 once.
    """
    row_tile = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, 16)[:, None]
    for i in tl.static_range(TILES):
        tile = tl.program_id(1) * TILES + i
        inside = tile < k_tiles
        at = row_tile * k_tiles + tile
        q = tl.load(words_ptr + at * (32 * BITS) + tl.arange(0, 32 * BITS), mask=inside, other=0)
        q = q.to(tl.uint32, bitcast=True)
        if BITS == 4:
            f0, f1, f2, f3 = e2m1_to_bf16(q.reshape(8, 4, 2, 2))  # g t G h
            even = tl.join(_pair(f0, _E2M1), _pair(f2, _E2M1))
            odd = tl.join(_pair(f1, _E2M1), _pair(f3, _E2M1))
            w = tl.join(even, odd).permute(3, 0, 2, 1, 5, 6, 4)  # g t G h p j c → h g G t j c p
        else:
            f0, f1 = e4m3_to_bf16(q.reshape(2, 8, 4, 2, 2))  # G g t j h
            w = tl.join(_pair(f0, _E4M3), _pair(f1, _E4M3)).permute(4, 1, 0, 2, 3, 6, 5)  # … p c → h g G t j c p
        if GROUPS:
            s = tl.load(scales_ptr + at * 8 + tl.arange(0, 8), mask=inside, other=0).to(tl.uint32, bitcast=True)
            b = (s.reshape(8, 1) >> (8 * tl.arange(0, 4)[None, :])) & 0xFF  # g (G h)
            factor = (b << 23).to(tl.float32, bitcast=True).reshape(8, 2, 2).permute(2, 0, 1)  # h g G
            w = w * factor.reshape(2, 8, 2, 1, 1, 1, 1)
        if ROW_SCALES:
            words = scales_ptr + (at + row_tile) * 16 + tl.arange(0, 16)
            s = tl.load(words, mask=inside, other=0).to(tl.uint32, bitcast=True)
        if ROW_SCALES and BITS == 8:
            b = (s.reshape(16, 1) >> (16 * tl.arange(0, 2)[None, :])) & 0xFFFF  # (g G) h
            factor = (b << 16).to(tl.float32, bitcast=True) * _FACTOR
            w = w * factor.reshape(8, 2, 2).permute(2, 0, 1).reshape(2, 8, 2, 1, 1, 1, 1)
        elif ROW_SCALES:
            b = (s.reshape(16, 1) >> (8 * tl.arange(0, 4)[None, :])) & 0xFF  # (g p) (G h)
            factor = ((b << 20) + _E5M3_BITS).to(tl.float32, bitcast=True).reshape(8, 2, 2, 2).permute(3, 0, 2, 1)
            w = w.reshape(2, 8, 2, 2, 16) * factor.reshape(2, 8, 2, 2, 1)  # h g G p
        w = w.reshape(16, 64)
        if ROW_SCALES:
            last = scales_ptr + ((row_tile + 1) * (k_tiles + 1) - 1) * 16
            w = w * tl.load(last + row).to(tl.float32, bitcast=True)
        elif not GROUPS:
            w = w * tl.load(scales_ptr + row_tile * 16 + row)
        column = tile * 64 + tl.arange(0, 64)[None, :]
        ok = inside & (column < k) & (row >= 0)
        tl.store(out_ptr + (row_tile * 16 + row) * k + column, to_bf16(w, PLAIN), mask=ok)
