"""The tensors of gpt-oss as the model file takes them, whatever they were called on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from microscale.formats import BlockScaled
from microscale.models.gpt_oss.config import GptOssConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class LayerTensors:
    """One decoder layer. H hidden, I intermediate, E experts."""

    attn_norm: Tensor  # [H]
    qkv_weight: Tensor  # [(heads + 2 * kv_heads) * head_dim, H], all of q, then k, then v
    qkv_bias: Tensor  # [(heads + 2 * kv_heads) * head_dim]
    sinks: Tensor  # [heads]
    o_weight: Tensor  # [H, heads * head_dim]
    o_bias: Tensor  # [H]
    mlp_norm: Tensor  # [H]
    router_weight: Tensor  # [E, H]
    router_bias: Tensor  # [E]
    gate_up: BlockScaled  # [E, 2I, H], gate rows even, up rows odd
    gate_up_bias: Tensor  # [E, 2I]
    down: BlockScaled  # [E, H, I]
    down_bias: Tensor  # [E, H]


class GptOssWeights(Protocol):
    """Where a model gets its tensors: each call reads or makes them anew, and keeps nothing."""

    @property
    def config(self) -> GptOssConfig: ...

    def embed(self, device: torch.device | str) -> Tensor:
        """``[vocab, H]``"""

    def layer(self, layer_idx: int, device: torch.device | str) -> LayerTensors: ...

    def norm(self, device: torch.device | str) -> Tensor:
        """``[H]``"""

    def lm_head(self, device: torch.device | str) -> Tensor:
        """``[vocab, H]``"""
