"""The gated activation, once: every kernel between the two GEMMs of an MLP or an expert calls ``gated``.

Plain Triton that Gluon kernels call too: it computes element by element and names no layout.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton
import triton.language as tl

SWIGLU_CLAMPED: tl.constexpr = tl.constexpr(0)
GELU_TANH: tl.constexpr = tl.constexpr(1)
SILU: tl.constexpr = tl.constexpr(2)


@triton.jit
def gated(g, up, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Float32 ``g`` (the gate's half) and ``up`` → float32. The kinds are those of ``moe/spec.GateKind``.

    gelu_tanh(g) is g * sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3)). Clamping keeps NaN (plain minimum and maximum drop
    it): a fault upstream must show.
    """
    if GATE == GELU_TANH:
        return g / (1.0 + tl.exp(-1.5957691216057308 * (g + 0.044715 * g * g * g))) * up
    elif GATE == SILU:
        return g / (1.0 + tl.exp(-g)) * up
    else:
        tl.static_assert(GATE == SWIGLU_CLAMPED)
        g = tl.minimum(g, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return g / (1.0 + tl.exp(-ALPHA * g)) * (up + 1.0)
