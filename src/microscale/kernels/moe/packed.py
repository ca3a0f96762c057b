"""An expert layer in the packed layout: what ``pack`` of every Triton implementation of ``moe`` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from microscale.formats import block_format
from microscale.kernels import layouts
from microscale.kernels.layouts import Packed, RowOrder
from microscale.kernels.moe.spec import Gate, MoeSpec, MoeWeights

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PackedExperts:
    """Both matrices of all experts, biases in packed row order and bf16."""

    gate_up: Packed
    down: Packed
    gate_up_bias: Tensor | None  # bf16 [experts, 2 * intermediate]
    down_bias: Tensor | None  # bf16 [experts, hidden]

    @property
    def hidden(self) -> int:
        return self.down.rows

    @property
    def intermediate(self) -> int:
        return self.gate_up.rows // 2

    @property
    def num_experts(self) -> int:
        return self.gate_up.num_experts

    @property
    def nbytes(self) -> int:
        biases = sum(bias.nbytes for bias in (self.gate_up_bias, self.down_bias) if bias is not None)
        return self.gate_up.nbytes + self.down.nbytes + biases


def packed_bytes(spec: MoeSpec) -> int:
    """Bytes of the packed experts of one layer, known before there are any."""
    fmt = block_format(spec.weight_format)
    matrices = ((2 * spec.intermediate, spec.hidden), (spec.hidden, spec.intermediate))
    total = sum(layouts.packed_bytes(fmt, spec.num_experts, rows, k) for rows, k in matrices)
    return total + (2 * spec.num_experts * (2 * spec.intermediate + spec.hidden) if spec.bias else 0)


def pack_experts(weights: MoeWeights, gate: Gate, device: torch.device | str | None = None) -> PackedExperts:
    """The checkpoint's experts in the packed layout on ``device`` (by default where they are)."""
    order = RowOrder.INTERLEAVED if gate.interleaved else RowOrder.HALVES
    findings = layouts.Findings()
    gate_up = layouts.pack(weights.gate_up, order, device, findings)
    down = layouts.pack(weights.down, RowOrder.PLAIN, device, findings)
    packed = PackedExperts(
        gate_up,
        down,
        _bias(weights.gate_up_bias, order, gate_up.device),
        _bias(weights.down_bias, RowOrder.PLAIN, down.device),
    )
    findings.refuse()
    return packed


def _bias(bias: Tensor | None, order: RowOrder, device: torch.device) -> Tensor | None:
    return None if bias is None else layouts.pack_rows(bias.to(device, torch.bfloat16), order).contiguous()
