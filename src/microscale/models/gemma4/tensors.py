"""The tensors of Gemma 4 as the model file takes them, whatever they were called on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from microscale.formats import BlockScaled
from microscale.models.gemma4.config import Gemma4Config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Weight: TypeAlias = "Tensor | BlockScaled"
"""BF16, or MXFP8 as the checkpoint has it."""


@dataclass(frozen=True)
class Gemma4Layer:
    """One decoder layer. H hidden, M width of the dense MLP, I of an expert, E experts; heads as the layer's kind has.

    The norms' names say what they stand around, since the checkpoint's do not.
    """

    attn_norm: Tensor  # [H], before attention
    qkv: Weight  # [(heads + 2 * kv_heads) * head_dim, H], all of q, then k, then v; where K = V there is no v
    q_norm: Tensor  # [head_dim]
    k_norm: Tensor  # [head_dim]
    o: Weight  # [H, heads * head_dim]
    attn_out_norm: Tensor  # [H], of what attention adds
    mlp_norm: Tensor  # [H], before the dense MLP
    gate_up: Weight  # [2M, H], all gate rows, then all up rows
    down: Weight  # [H, M]
    mlp_out_norm: Tensor  # [H], of what the dense MLP gives
    experts_norm: Tensor  # [H], before the experts
    router_scale: Tensor  # [H], on the plain norm that the router reads
    router: Tensor  # [E, H]
    expert_scale: Tensor  # [E], on the routing weights
    experts_gate_up: Weight  # [E, 2I, H], all gate rows, then all up rows
    experts_down: Weight  # [E, H, I]
    experts_out_norm: Tensor  # [H], of what the experts give
    both_norm: Tensor  # [H], of MLP and experts together
    scalar: float
    """Factor on the residual stream at the layer's end."""


class Gemma4Weights(Protocol):
    """Where a model gets its tensors: each call reads or makes them anew, and keeps nothing."""

    @property
    def config(self) -> Gemma4Config: ...

    def embed(self, device: torch.device | str) -> Tensor:
        """``[vocab, H]``"""

    def layer(self, layer_idx: int, device: torch.device | str) -> Gemma4Layer: ...

    def norm(self, device: torch.device | str) -> Tensor:
        """``[H]``"""

    def lm_head(self, device: torch.device | str) -> Tensor:
        """``[vocab, H]``; asked for only where it is not the embedding table."""
