"""The tensors of draft heads as their models take them, whatever they were called on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from microscale.models.draft_heads.config import DFlashConfig, Eagle3Config

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class LayerTensors:
    """One decoder layer. H hidden, I intermediate, C the columns that it reads: 2H in an EAGLE3 head."""

    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, C], all of q, then k, then v
    qkv_bias: Tensor | None  # [(heads + 2 * kv_heads) * head_dim]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    o: Tensor  # [H, heads * head_dim]
    o_bias: Tensor | None  # [H]
    mlp_norm: Tensor  # [H]
    gate_up: Tensor  # [2I, H], all of gate, then up
    down: Tensor  # [H, I]
    input_norm: Tensor  # [H]: of what the layer reads; in an EAGLE3 head, of the embedding


@dataclass(frozen=True)
class Eagle3Tensors:
    fc: Tensor  # [H, taps * target's hidden]
    fc_norm: Tensor | None  # [taps * target's hidden]: of all taps, or those of each side by side
    hidden_norm: Tensor  # [H]
    layer: LayerTensors
    norm: Tensor  # [H]
    lm_head: Tensor | None  # [draft vocabulary, H]; None: the target's
    embed: Tensor | None  # [vocabulary, H]; None: the target's
    d2t: Tensor | None  # [draft vocabulary] int64


@dataclass(frozen=True)
class DFlashTensors:
    """Without the layers, which are read one at a time."""

    fc: Tensor  # [H, taps * target's hidden]
    hidden_norm: Tensor  # [H]
    norm: Tensor  # [H]


class Eagle3Weights(Protocol):
    @property
    def config(self) -> Eagle3Config: ...

    def tensors(self, device: torch.device) -> Eagle3Tensors: ...


class DFlashWeights(Protocol):
    @property
    def config(self) -> DFlashConfig: ...

    def tensors(self, device: torch.device) -> DFlashTensors: ...

    def layer(self, layer_idx: int, device: torch.device) -> LayerTensors: ...
