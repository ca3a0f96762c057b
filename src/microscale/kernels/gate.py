"""The launch constants of a gated activation: what ``gate_jit.gated`` takes."""

from __future__ import annotations

from functools import cache
from typing import Any

from microscale.kernels import gate_jit
from microscale.kernels.moe.spec import Gate, GateKind


@cache
def _codes() -> dict[GateKind, int]:
    return {
        GateKind.SWIGLU_CLAMPED: gate_jit.SWIGLU_CLAMPED.value,
        GateKind.GELU_TANH: gate_jit.GELU_TANH.value,
        GateKind.SILU: gate_jit.SILU.value,
    }


def gate_constants(gate: Gate) -> dict[str, Any]:
    return {"GATE": _codes()[gate.kind], "ALPHA": gate.alpha, "LIMIT": gate.limit}
