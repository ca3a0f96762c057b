"""What kernels do otherwise under Triton's interpreter. ``PLAIN`` is a constant of the launch; a GPU sees none of it.

The interpreter truncates to bf16 where a GPU rounds, and multiplies the bits of bf16 operands of ``dot`` as integers.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_bf16(v, PLAIN: tl.constexpr):
    """float32 → the nearest bf16, ties to even."""
    if PLAIN:
        bits = v.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return v.to(tl.bfloat16)
