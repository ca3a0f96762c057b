"""The spec of an op from the weights that a model binds: what the weights are in the checkpoint, for one token."""

from __future__ import annotations

from microscale.kernels.dense.spec import DenseSpec, DenseWeights
from microscale.kernels.moe.spec import Gate, MoeSpec
from microscale.kernels.op import Activations
from microscale.planning.quantise import Weight, format_name


def dense_spec(
    weights: DenseWeights, activations: Activations, softcap: float | None = None, behind_sum: bool = False
) -> DenseSpec:
    rows, columns = weights.weight.shape
    bias = weights.bias is not None
    return DenseSpec(rows, columns, weights.format, activations, bias, 1, softcap, behind_sum)


def moe_spec(gate_up: Weight, activations: Activations, top_k: int, gate: Gate, *, bias: bool) -> MoeSpec:
    """``gate_up [experts, twice the width after the gate, hidden]``."""
    experts, rows, hidden = gate_up.shape
    return MoeSpec(experts, top_k, hidden, rows // 2, format_name(gate_up), activations, gate, bias, tokens=1)
