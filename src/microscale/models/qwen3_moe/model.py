"""Qwen3-MoE, once: the same code runs on plain references and on the fast kernels.

A decoder layer is: norm, fused QKV, a norm of each head of queries and keys, rotary positions, paged attention over the
whole context, output projection; norm, router, mixture of experts. Everything is added to the residual stream. There
are no biases, no windows and no sinks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from microscale.backends.ops import (
    AttentionSpec,
    DenseWeights,
    Gate,
    GateKind,
    HeadNorms,
    Ops,
    Router,
    SmallSpec,
)
from microscale.models.batch import KvCache
from microscale.models.config import LayerKind
from microscale.models.lm_head import own_rows
from microscale.models.pre_norm import LayerSizes, PreNormLayer, PreNormModel
from microscale.models.qwen3_moe.config import Qwen3MoeConfig
from microscale.models.qwen3_moe.tensors import Qwen3MoeLayer, Qwen3MoeWeights
from microscale.models.rope import rope_table

if TYPE_CHECKING:
    import torch

FULL = LayerKind.FULL
GATE = Gate(GateKind.SILU, interleaved=False)


def bind_layer(config: Qwen3MoeConfig, tensors: Qwen3MoeLayer, ops: Ops, page_size: int) -> PreNormLayer:
    """One layer on its kernels, bound in the order in which they run: see ``models/outline.py``."""
    dtype, epsilon = ops.dtype, config.rms_epsilon
    return PreNormLayer(
        kind=FULL,
        sizes=LayerSizes(config.num_heads, config.head_dim, config.top_k, epsilon),
        attn_norm=tensors.attn_norm.to(dtype),
        qkv=ops.dense("qkv", DenseWeights(tensors.qkv), behind_sum=True),
        head_norms=HeadNorms(tensors.q_norm.to(dtype), tensors.k_norm.to(dtype), epsilon, values=False),
        attention=ops.attention(FULL.value, attention_spec(config, ops, page_size), None),
        o=ops.dense("o", DenseWeights(tensors.o)),
        mlp_norm=tensors.mlp_norm.to(dtype),
        # Softmax over all experts, renormalised over the chosen: the same as a softmax over those.
        router=Router(tensors.router.to(dtype)),
        experts=ops.experts("experts", tensors.gate_up, tensors.down, config.top_k, GATE),
        small=ops.small(small_spec(config, ops)),
        ranks=ops.ranks,
    )


def attention_spec(config: Qwen3MoeConfig, ops: Ops, page_size: int) -> AttentionSpec:
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        window=None,
        sinks=False,
        page_size=page_size,
        activations=ops.activations,
        tokens=1,
        context=config.max_context,
    )


def small_spec(config: Qwen3MoeConfig, ops: Ops) -> SmallSpec:
    return SmallSpec(
        hidden=config.hidden,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_experts=config.num_experts,
        top_k=config.top_k,
        activations=ops.activations,
        tokens=1,
    )


class Qwen3Moe(PreNormModel):
    """The whole model. Loading reads one layer at a time; a layer's checkpoint bytes go as soon as it is packed."""

    def __init__(
        self,
        weights: Qwen3MoeWeights,
        ops: Ops,
        device: torch.device,
        page_size: int = 16,
        on_layer: Callable[[], None] = lambda: None,
    ) -> None:
        config = weights.config
        self.config = config
        self.ops = ops
        self.device = device
        self.page_size = page_size
        table = weights.embed(device)
        self.embed = ops.embed(table)
        layers = []
        for layer_idx in range(config.num_layers):
            layers.append(bind_layer(config, weights.layer(layer_idx, device), ops, page_size))
            on_layer()
        self.layers = layers
        self.norm = weights.norm(device).to(ops.dtype)
        lm_head = own_rows(table, config) if config.tied else weights.lm_head(device)
        self.lm_head = ops.dense("lm_head", DenseWeights(lm_head))
        self.sampling = ops.sampling(config.vocab_size)
        self.rope = {FULL: ops.computed(lambda: rope_table(config.rope, config.head_dim, device))}

    def new_cache(self, num_pages: dict[LayerKind, int]) -> KvCache:
        """An empty KV cache with this many pages; no layer slides."""
        config = self.config
        shapes = {FULL: (config.num_kv_heads, config.head_dim)}
        return KvCache.allocate(config.layer_kinds, num_pages, self.page_size, shapes, self.ops.kv_dtype, self.device)
