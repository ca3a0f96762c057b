"""Random Qwen3-MoE weights of the right shapes and formats, or the shapes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from microscale.models.dummy_weights import DummyEnds
from microscale.models.qwen3_moe.config import Qwen3MoeConfig
from microscale.models.qwen3_moe.tensors import Qwen3MoeLayer, Weight

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class DummyQwen3Moe(DummyEnds[Qwen3MoeConfig]):
    """A ``Qwen3MoeWeights`` without a checkpoint: BF16 near N(0, 0.02), norms near 1."""

    def layer(self, layer_idx: int, device: torch.device | str) -> Qwen3MoeLayer:
        c, tensors = self.config, self._make

        def normal(name: str, *shape: int, std: float = 0.02, mean: float = 0.0) -> Tensor:
            return tensors.normal(f"layers.{layer_idx}.{name}", shape, device, std, mean)

        def near_one(name: str, size: int) -> Tensor:
            return normal(name, size, std=0.05, mean=1.0)

        def experts(name: str, *shape: int) -> Weight:
            if c.expert_format == "bf16":
                return normal(name, *shape)
            make = {"mxfp4": tensors.mxfp4, "mxfp8": tensors.mxfp8}[c.expert_format]
            return make(f"layers.{layer_idx}.{name}", shape, device)

        return Qwen3MoeLayer(
            attn_norm=near_one("attn_norm", c.hidden),
            qkv=normal("qkv", c.qkv_rows, c.hidden),
            q_norm=near_one("q_norm", c.head_dim),
            k_norm=near_one("k_norm", c.head_dim),
            o=normal("o", c.hidden, c.num_heads * c.head_dim),
            mlp_norm=near_one("mlp_norm", c.hidden),
            router=normal("router", c.num_experts, c.hidden),
            gate_up=experts("gate_up", c.num_experts, 2 * c.intermediate, c.hidden),
            down=experts("down", c.num_experts, c.hidden, c.intermediate),
        )
