"""``moe`` with the experts decoded once, at load: what a CPU uses by default, and a fallback on any GPU.

It trades memory (two or four bytes a weight instead of half a byte) for not decoding on every call. Its loop over
experts reads the routing back to the host, so it cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from microscale.formats import FORMATS, BlockScaled, decode
from microscale.hardware import Gpu
from microscale.kernels.linear import linear
from microscale.kernels.moe.cost import activation_bytes, expected_experts, expert_flops, weights_per_expert
from microscale.kernels.moe.reference import apply_gate
from microscale.kernels.moe.spec import MoeOp, MoePath, MoeSpec, MoeWeights, Routing
from microscale.kernels.op import Cost, Reason, always, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DequantizedExperts:
    gate_up: Tensor  # [experts, 2 * intermediate, hidden]
    down: Tensor  # [experts, hidden, intermediate]
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


def _decode_experts(tensor: BlockScaled, dtype: torch.dtype) -> Tensor:
    """All experts in ``dtype``, one at a time: the temporary float32 copy is never larger than one expert."""
    out = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    for expert in range(tensor.shape[0]):
        out[expert] = decode(tensor[expert], dtype)
    return out


def _run(packed: DequantizedExperts, spec: MoeSpec, gpu: Gpu, x: Tensor, routing: Routing) -> Tensor:
    if x.is_meta:  # no numbers, no experts chosen, and none of our kernels
        return x.new_empty(x.shape)
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    x = x.to(packed.gate_up.dtype)
    for expert in routing.expert_ids.unique().tolist():
        token, slot = (routing.expert_ids == expert).nonzero(as_tuple=True)
        bias = None if packed.gate_up_bias is None else packed.gate_up_bias[expert]
        h = linear(x[token], packed.gate_up[expert], bias)
        a = apply_gate(h.float(), spec.gate).to(h.dtype)
        bias = None if packed.down_bias is None else packed.down_bias[expert]
        out = linear(a, packed.down[expert], bias).float()
        y.index_add_(0, token, out * routing.weights[token, slot, None])
    return y.to(x.dtype)


class DequantizedMoe(MoeOp[DequantizedExperts]):
    """Experts in the activations' own type and plain matrix products."""

    name = "dequantized"
    paths = (MoePath("expert by expert", "it is the only one", always, _run),)
    layout = "dequantized"
    uncapturable = "reads the routing on the host"

    def supports(self, spec: MoeSpec, gpu: Gpu) -> Reason | None:
        if spec.weight_format not in FORMATS:
            return f"reads {', '.join(FORMATS)} experts, not {spec.weight_format}"
        if spec.activations.narrow:
            return f"multiplies in bf16 or float32, not with {spec.activations} activations"
        return None

    def cost(self, spec: MoeSpec, gpu: Gpu) -> Cost:
        size = spec.activations.itemsize
        weights = round(expected_experts(spec) * weights_per_expert(spec) * size)
        return Cost(weights + activation_bytes(spec), expert_flops(spec), efficiency=0.4)

    def packed_bytes(self, spec: MoeSpec) -> int:
        return spec.num_experts * weights_per_expert(spec) * spec.activations.itemsize

    def pack(self, weights: MoeWeights, spec: MoeSpec) -> DequantizedExperts:
        dtype = torch_dtype(spec.activations)
        return DequantizedExperts(
            gate_up=_decode_experts(weights.gate_up, dtype),
            down=_decode_experts(weights.down, dtype),
            gate_up_bias=None if weights.gate_up_bias is None else weights.gate_up_bias.to(dtype),
            down_bias=None if weights.down_bias is None else weights.down_bias.to(dtype),
        )
