"""``moe`` as plain float32 arithmetic on any device: the truth that every other implementation is held against.

Experts are decoded one at a time and only when a token uses them, so the packed weights are all that stays in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from microscale.formats import FORMATS, MXFP4, MXFP8, NVFP4, decode
from microscale.hardware import Gpu
from microscale.kernels.moe.cost import bytes_per_expert, expert_flops, expert_weight_bytes
from microscale.kernels.moe.spec import Activations, Gate, GateKind, MoeOp, MoePath, MoeSpec, MoeWeights, Routing
from microscale.kernels.narrow import Rounding, rounding, widened
from microscale.kernels.op import Cost, Reason, always

if TYPE_CHECKING:
    from torch import Tensor


MEETS = {Activations.MXFP8: (MXFP4.name, MXFP8.name), Activations.NVFP4: (NVFP4.name,)}
"""Narrow activations → the weights that they meet in kernels."""


def apply_gate(h: Tensor, gate: Gate) -> Tensor:
    """``h [..., 2 * intermediate]`` → ``[..., intermediate]``."""
    if gate.interleaved:
        runs = h.reshape(*h.shape[:-1], h.shape[-1] // (2 * gate.run), 2, gate.run)
        g, up = runs[..., 0, :].flatten(-2), runs[..., 1, :].flatten(-2)
    else:
        g, up = h.chunk(2, dim=-1)
    if gate.kind is GateKind.GELU_TANH:
        return torch.nn.functional.gelu(g, approximate="tanh") * up
    if gate.kind is GateKind.SILU:
        return torch.nn.functional.silu(g) * up
    g = g.clamp(max=gate.limit)
    up = up.clamp(-gate.limit, gate.limit)
    return (up + 1) * g * torch.sigmoid(gate.alpha * g)


def moe(
    x: Tensor,
    weights: MoeWeights,
    routing: Routing,
    gate: Gate,
    round_x: Rounding = widened,
    round_h: Rounding = widened,
) -> Tensor:
    """``x [tokens, hidden]`` → ``[tokens, hidden]`` in float32. ``round_x``, ``round_h``: what the GEMMs' inputs are
    rounded to."""
    x = round_x(x)
    y = torch.zeros_like(x)
    for expert in routing.expert_ids.unique().tolist():
        token, slot = (routing.expert_ids == expert).nonzero(as_tuple=True)
        h = x[token] @ decode(weights.gate_up[expert]).T
        if weights.gate_up_bias is not None:
            h = h + weights.gate_up_bias[expert].float()
        out = round_h(apply_gate(h, gate)) @ decode(weights.down[expert]).T
        if weights.down_bias is not None:
            out = out + weights.down_bias[expert].float()
        y.index_add_(0, token, out * routing.weights[token, slot, None])
    return y


def _run(packed: MoeWeights, spec: MoeSpec, gpu: Gpu, x: Tensor, routing: Routing) -> Tensor:
    if x.is_meta:  # there are no numbers: no expert is chosen, and no kernel of ours would run
        return x.new_empty(x.shape)
    met = rounding(spec.activations)
    return moe(x, packed, routing, spec.gate, met, met).to(x.dtype)


class ReferenceMoe(MoeOp[MoeWeights]):
    """Float32, one expert at a time, nothing kept decoded."""

    name = "reference"
    paths = (MoePath("expert by expert", "it is the only one", always, _run),)
    layout = "checkpoint"
    uncapturable = "reads the routing on the host"

    def supports(self, spec: MoeSpec, gpu: Gpu) -> Reason | None:
        if spec.weight_format not in FORMATS:
            return f"reads {', '.join(FORMATS)} experts, not {spec.weight_format}"
        if spec.activations.narrow and not gpu.is_cpu:
            return f"computes with {spec.activations} activations on a CPU alone"
        if spec.weight_format not in MEETS.get(spec.activations, FORMATS):
            return f"has no {spec.activations} activations for {spec.weight_format} experts, as no kernel has"
        return None

    def cost(self, spec: MoeSpec, gpu: Gpu) -> Cost:
        # Decoding to float32 writes and reads 4 bytes a weight, in several passes: hence the low efficiency.
        return Cost(expert_weight_bytes(spec), expert_flops(spec), efficiency=0.01)

    def packed_bytes(self, spec: MoeSpec) -> int:
        return spec.num_experts * bytes_per_expert(spec)

    def pack(self, weights: MoeWeights, spec: MoeSpec) -> MoeWeights:
        return weights
