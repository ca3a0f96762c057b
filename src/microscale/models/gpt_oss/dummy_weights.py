"""Random gpt-oss weights of the right shapes, or the shapes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from microscale.formats import BlockScaled
from microscale.models.dummy_weights import DummyEnds
from microscale.models.gpt_oss.config import GptOssConfig
from microscale.models.gpt_oss.tensors import LayerTensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class DummyWeights(DummyEnds[GptOssConfig]):
    """A ``GptOssWeights`` without a checkpoint: weights near N(0, 0.02), biases and sinks off zero, norms near 1."""

    def layer(self, layer_idx: int, device: torch.device | str) -> LayerTensors:
        c = self.config
        hidden, experts = c.hidden, c.num_experts

        def normal(name: str, *shape: int, std: float = 0.02, mean: float = 0.0) -> Tensor:
            return self._make.normal(f"layers.{layer_idx}.{name}", shape, device, std, mean)

        def mxfp4(name: str, *shape: int) -> BlockScaled:
            return self._make.mxfp4(f"layers.{layer_idx}.{name}", shape, device)

        return LayerTensors(
            attn_norm=normal("attn_norm", hidden, std=0.05, mean=1.0),
            qkv_weight=normal("qkv_weight", c.qkv_rows, hidden),
            qkv_bias=normal("qkv_bias", c.qkv_rows, std=0.1),
            sinks=normal("sinks", c.num_heads, std=1.0),
            o_weight=normal("o_weight", hidden, c.num_heads * c.head_dim),
            o_bias=normal("o_bias", hidden, std=0.1),
            mlp_norm=normal("mlp_norm", hidden, std=0.05, mean=1.0),
            router_weight=normal("router_weight", experts, hidden),
            router_bias=normal("router_bias", experts, std=0.1),
            gate_up=mxfp4("gate_up", experts, 2 * c.intermediate, hidden),
            gate_up_bias=normal("gate_up_bias", experts, 2 * c.intermediate, std=0.1),
            down=mxfp4("down", experts, hidden, c.intermediate),
            down_bias=normal("down_bias", experts, hidden, std=0.1),
        )
