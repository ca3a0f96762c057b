"""Draft heads without a checkpoint: random numbers for tests of speed and memory, or shapes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from microscale.models.draft_heads.config import DFlashConfig, Eagle3Config, LayerShape
from microscale.models.draft_heads.tensors import DFlashTensors, Eagle3Tensors, LayerTensors
from microscale.models.dummy_weights import TensorMaker

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class DummyHead:
    """BF16 near N(0, 0.02), norms near 1."""

    def __init__(self, make: TensorMaker) -> None:
        self._make = make

    def _normal(self, name: str, device: torch.device, *shape: int) -> Tensor:
        return self._make.normal(f"draft_head.{name}", shape, device)

    def _near_one(self, name: str, device: torch.device, size: int) -> Tensor:
        return self._make.normal(f"draft_head.{name}", (size,), device, 0.05, 1.0)

    def _layer(self, shape: LayerShape, layer_idx: int, columns: int, device: torch.device) -> LayerTensors:
        def normal(name: str, *sizes: int) -> Tensor:
            return self._normal(f"{layer_idx}.{name}", device, *sizes)

        def near_one(name: str, size: int) -> Tensor:
            return self._near_one(f"{layer_idx}.{name}", device, size)

        return LayerTensors(
            qkv=normal("qkv", shape.qkv_rows, columns),
            qkv_bias=normal("qkv_bias", shape.qkv_rows) if shape.attention_bias else None,
            q_norm=near_one("q_norm", shape.head_dim) if shape.head_norms else None,
            k_norm=near_one("k_norm", shape.head_dim) if shape.head_norms else None,
            o=normal("o", shape.hidden, shape.num_heads * shape.head_dim),
            o_bias=normal("o_bias", shape.hidden) if shape.attention_bias else None,
            mlp_norm=near_one("mlp_norm", shape.hidden),
            gate_up=normal("gate_up", 2 * shape.intermediate, shape.hidden),
            down=normal("down", shape.hidden, shape.intermediate),
            input_norm=near_one("input_norm", shape.hidden),
        )


class DummyEagle3(DummyHead):
    """An ``Eagle3Weights``. Draft tokens are the first ones of the target."""

    def __init__(self, config: Eagle3Config, make: TensorMaker) -> None:
        super().__init__(make)
        self.config = config

    def tensors(self, device: torch.device) -> Eagle3Tensors:
        c, hidden = self.config, self.config.layer.hidden
        normed = c.norm_before_fc or c.norm_of_each_tap
        return Eagle3Tensors(
            fc=self._normal("fc", device, hidden, c.reads.width),
            fc_norm=self._near_one("fc_norm", device, c.reads.width) if normed else None,
            hidden_norm=self._near_one("hidden_norm", device, hidden),
            layer=self._layer(c.layer, 0, 2 * hidden, device),
            norm=self._near_one("norm", device, hidden),
            lm_head=self._normal("lm_head", device, len(c.own_rows), hidden) if c.own_lm_head else None,
            embed=self._normal("embed", device, c.reads.vocab_size, hidden) if c.own_embedding else None,
            d2t=self._make.zero_ids(c.draft_vocab_size, device) if c.maps_vocabulary else None,
        )


class DummyDFlash(DummyHead):
    """A ``DFlashWeights``."""

    def __init__(self, config: DFlashConfig, make: TensorMaker) -> None:
        super().__init__(make)
        self.config = config

    def tensors(self, device: torch.device) -> DFlashTensors:
        hidden = self.config.layer.hidden
        return DFlashTensors(
            fc=self._normal("fc", device, hidden, self.config.reads.width),
            hidden_norm=self._near_one("hidden_norm", device, hidden),
            norm=self._near_one("norm", device, hidden),
        )

    def layer(self, layer_idx: int, device: torch.device) -> LayerTensors:
        return self._layer(self.config.layer, layer_idx, self.config.layer.hidden, device)
