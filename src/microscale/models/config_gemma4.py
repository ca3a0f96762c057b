"""What a Gemma 4 mixture-of-experts model is, as far as plans and memory need it: its sizes and layer kinds.

Every layer has a dense MLP beside its experts. Full layers have fewer and wider heads and no ``v_proj``: keys and
values come from one projection, and both are cached, since norms and rope make them differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from microscale.models.config import LayerKind


@dataclass(frozen=True)
class Heads:
    """The heads of one kind of layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    shared_kv: bool
    """Keys and values are one projection."""

    @property
    def qkv_rows(self) -> int:
        return (self.num_heads + (1 if self.shared_kv else 2) * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True)
class Gemma4Config:
    """The sizes of one Gemma 4 model with experts."""

    hidden: int
    mlp: int
    """Width of the dense MLP after the gate."""
    intermediate: int
    """Width of one expert after the gate."""
    num_experts: int
    top_k: int
    vocab_size: int
    sliding_window: int
    layer_kinds: tuple[LayerKind, ...]
    heads: dict[LayerKind, Heads]
    max_context: int
    weight_format: str
    """Of the linear layers and the experts; router, norms and embeddings are bf16."""
    tied: bool
    """lm_head is the embedding table."""

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)


GEMMA_4_26B_A4B = Gemma4Config(
    hidden=2816,
    mlp=2112,
    intermediate=704,
    num_experts=128,
    top_k=8,
    vocab_size=262144,
    sliding_window=1024,
    layer_kinds=(*(LayerKind.SLIDING,) * 5, LayerKind.FULL) * 5,
    heads={
        LayerKind.SLIDING: Heads(16, 8, 256, shared_kv=False),
        LayerKind.FULL: Heads(16, 2, 512, shared_kv=True),
    },
    max_context=262144,
    weight_format="mxfp8",
    tied=True,
)
