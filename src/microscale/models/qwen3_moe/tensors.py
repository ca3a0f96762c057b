"""The tensors of Qwen3-MoE as the model file takes them, whatever they were called on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from microscale.formats import BlockScaled
from microscale.models.qwen3_moe.config import Qwen3MoeConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Weight: TypeAlias = "Tensor | BlockScaled"
"""BF16 as the checkpoint has it, or random numbers in a block format."""


@dataclass(frozen=True)
class Qwen3MoeLayer:
    """One decoder layer. H hidden, I width of an expert, E experts."""

    attn_norm: Tensor  # [H]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, H], all of q, then k, then v
    q_norm: Tensor  # [head_dim]
    k_norm: Tensor  # [head_dim]
    o: Tensor  # [H, heads * head_dim]
    mlp_norm: Tensor  # [H]
    router: Tensor  # [E, H]
    gate_up: Weight  # [E, 2I, H], all gate rows, then all up rows
    down: Weight  # [E, H, I]


class Qwen3MoeWeights(Protocol):
    """Where a model gets its tensors: each call reads or makes them anew, and keeps nothing."""

    @property
    def config(self) -> Qwen3MoeConfig: ...

    def embed(self, device: torch.device | str) -> Tensor:
        """``[vocab, H]``"""

    def layer(self, layer_idx: int, device: torch.device | str) -> Qwen3MoeLayer: ...

    def norm(self, device: torch.device | str) -> Tensor:
        """``[H]``"""

    def lm_head(self, device: torch.device | str) -> Tensor:
        """``[vocab, H]``; asked for only where it is not the embedding table."""
