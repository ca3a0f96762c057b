"""Random Gemma 4 weights of the right shapes and formats, or the shapes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from microscale.models.dummy_weights import DummyEnds
from microscale.models.gemma4.config import Gemma4Config
from microscale.models.gemma4.tensors import Gemma4Layer, Weight

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class DummyGemma4(DummyEnds[Gemma4Config]):
    """A ``Gemma4Weights`` without a checkpoint: BF16 near N(0, 0.02), norms and scales near 1.

    Norms stand around every sum, so the residual stream's RMS grows with the root of the layers: 9 at the end of 30.
    """

    def layer(self, layer_idx: int, device: torch.device | str) -> Gemma4Layer:
        c, tensors = self.config, self._make
        formats, heads = c.formats[layer_idx], c.heads[c.layer_kinds[layer_idx]]

        def weight(name: str, fmt: str, *shape: int) -> Weight:
            make = tensors.normal if fmt == "bf16" else tensors.mxfp8
            return make(f"layers.{layer_idx}.{name}", shape, device)

        def near_one(name: str, size: int = c.hidden, mean: float = 1.0, *, float32: bool = False) -> Tensor:
            return tensors.normal(f"layers.{layer_idx}.{name}", (size,), device, 0.05 * mean, mean, float32=float32)

        # Scores are not divided by a root of the head's size. With norms near 1 they spread over 16, one key takes all,
        # and bf16 moves the logits by 40 %; so they spread over 1, and it moves them by 1.3 % (6 layers, CPU).
        head_mean = heads.head_dim**-0.25

        return Gemma4Layer(
            attn_norm=near_one("attn_norm"),
            qkv=weight("qkv", formats.qkv, heads.qkv_rows, c.hidden),
            q_norm=near_one("q_norm", heads.head_dim, head_mean),
            k_norm=near_one("k_norm", heads.head_dim, head_mean),
            o=weight("o", formats.o, c.hidden, heads.num_heads * heads.head_dim),
            attn_out_norm=near_one("attn_out_norm"),
            mlp_norm=near_one("mlp_norm"),
            gate_up=weight("gate_up", formats.gate_up, 2 * c.mlp, c.hidden),
            down=weight("down", formats.down, c.hidden, c.mlp),
            mlp_out_norm=near_one("mlp_out_norm"),
            experts_norm=near_one("experts_norm"),
            router_scale=near_one("router_scale"),
            # The router reads its norm times the root of the width: at 0.02 all experts would be alike.
            router=tensors.normal(f"layers.{layer_idx}.router", (c.num_experts, c.hidden), device, std=1.0),
            expert_scale=near_one("expert_scale", c.num_experts, float32=True),
            experts_gate_up=weight("experts_gate_up", formats.experts, c.num_experts, 2 * c.intermediate, c.hidden),
            experts_down=weight("experts_down", formats.experts, c.num_experts, c.hidden, c.intermediate),
            experts_out_norm=near_one("experts_out_norm"),
            both_norm=near_one("both_norm"),
            scalar=1.0,
        )
