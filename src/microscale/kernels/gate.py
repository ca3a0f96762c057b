"""The launch constants of a gated activation: what ``gate_jit.gated`` takes."""

from __future__ import annotations

from typing import Any

from microscale.kernels import gate_jit
from microscale.kernels.moe.spec import Gate, GateKind

_CODES = {
    GateKind.SWIGLU_CLAMPED: gate_jit.SWIGLU_CLAMPED,
    GateKind.GELU_TANH: gate_jit.GELU_TANH,
    GateKind.SILU: gate_jit.SILU,
}


def gate_constants(gate: Gate) -> dict[str, Any]:
    return {"GATE": _CODES[gate.kind].value, "ALPHA": gate.alpha, "LIMIT": gate.limit}
