"""Jit code that turns keys and values into the E4M3 codes of an FP8 cache.

A number is divided by its head's scale, as the reference does. A division is 8 instructions, a check and a branch, and
numbers that fail the check (0 is one of them) take a call of 60 more, one after the other. All numbers of a head have
the same divisor, so here its inverse is computed once, and each number takes 3 instructions.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton
import triton.language as tl

from microscale.kernels.mxfp8_jit import round_e4m3


@triton.jit
def _divide(x, scale):
    """``x / scale`` in float32 as a division rounds it, where it is below 512. (Larger numbers saturate anyway, and
    infinity would become NaN here.)

    The inverse is off by half a unit in its last place, so the product is off by up to two. What it misses is exact in
    a fused multiply-add, and as many inverses of it make it up.
    """
    inverse = tl.math.div_rn(tl.zeros_like(scale) + 1.0, scale)
    inverse = tl.broadcast_to(inverse, x.shape)
    near = tl.minimum(tl.maximum(x * inverse, -512.0), 512.0)
    missed = tl.fma(-near, tl.broadcast_to(scale, x.shape), x)
    return tl.fma(missed, inverse, near)


@triton.jit
def to_codes(x, scale, PLAIN: tl.constexpr):
    """``x`` (bf16) by ``scale`` (float32, a number or as many as broadcast to ``x``) → the nearest E4M3 codes.

    Rounded by bits: GPUs before SM 8.9 have no conversion. PLAIN: Triton's interpreter has no fused multiply-add.
    """
    x = x.to(tl.float32)
    if PLAIN:
        quotient = tl.math.div_rn(x, tl.zeros_like(x) + scale)
    else:
        quotient = _divide(x, scale)
    return round_e4m3(quotient, True)
