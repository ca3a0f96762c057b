"""gpt-oss, once: the same code runs on plain references and on the fast kernels.

A decoder layer is: norm, fused QKV, rotary positions, paged attention with a learned sink per head (every other layer
sees only a window), output projection; norm, router, mixture of experts. Everything is added to the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from microscale.backends.ops import (
    AttentionSpec,
    DenseWeights,
    Gate,
    GateKind,
    MoeWeights,
    Ops,
    Router,
    SmallSpec,
)
from microscale.models.batch import KvCache
from microscale.models.config import LayerKind
from microscale.models.gpt_oss.config import GptOssConfig
from microscale.models.gpt_oss.tensors import GptOssWeights, LayerTensors
from microscale.models.pre_norm import LayerSizes, PreNormLayer, PreNormModel
from microscale.models.rope import yarn_table

if TYPE_CHECKING:
    import torch


def bind_layer(config: GptOssConfig, kind: LayerKind, tensors: LayerTensors, ops: Ops, page_size: int) -> PreNormLayer:
    """One layer on its kernels, bound in the order in which they run: see ``models/outline.py``."""
    return PreNormLayer(
        kind=kind,
        sizes=LayerSizes(config.num_heads, config.head_dim, config.top_k, config.rms_epsilon),
        attn_norm=tensors.attn_norm,
        qkv=ops.dense("qkv", DenseWeights(tensors.qkv_weight, tensors.qkv_bias), behind_sum=True),
        head_norms=None,
        attention=ops.attention(kind.value, attention_spec(config, kind, ops, page_size), tensors.sinks),
        o=ops.dense("o", DenseWeights(tensors.o_weight, tensors.o_bias)),
        mlp_norm=tensors.mlp_norm,
        router=Router(tensors.router_weight.to(ops.dtype), tensors.router_bias.to(ops.dtype)),
        experts=ops.moe(
            MoeWeights(tensors.gate_up, tensors.down, tensors.gate_up_bias, tensors.down_bias),
            config.top_k,
            Gate(GateKind.SWIGLU_CLAMPED, interleaved=True, alpha=config.swiglu_alpha, limit=config.swiglu_limit),
        ),
        small=ops.small(small_spec(config, ops)),
        ranks=ops.ranks,
    )


def attention_spec(config: GptOssConfig, kind: LayerKind, ops: Ops, page_size: int) -> AttentionSpec:
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        window=config.sliding_window if kind is LayerKind.SLIDING else None,
        sinks=True,
        page_size=page_size,
        activations=ops.activations,
        tokens=1,
        context=config.max_context,
    )


def small_spec(config: GptOssConfig, ops: Ops) -> SmallSpec:
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


class GptOss(PreNormModel):
    """The whole model. Loading reads one layer at a time; a layer's checkpoint bytes go as soon as it is packed."""

    def __init__(
        self,
        weights: GptOssWeights,
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
        self.embed = ops.embed(weights.embed(device))
        layers = []
        for layer_idx, kind in enumerate(config.layer_kinds):
            layers.append(bind_layer(config, kind, weights.layer(layer_idx, device), ops, page_size))
            on_layer()
        self.layers = layers
        self.norm = weights.norm(device)
        self.lm_head = ops.dense("lm_head", DenseWeights(weights.lm_head(device)))
        self.sampling = ops.sampling(config.vocab_size)
        self.rope = dict.fromkeys(LayerKind, ops.computed(lambda: yarn_table(config.rope, config.head_dim, device)))

    def new_cache(self, num_pages: dict[LayerKind, int]) -> KvCache:
        """An empty KV cache with this many pages for each kind of layer."""
        config = self.config
        return KvCache.allocate(
            config.layer_kinds,
            num_pages,
            self.page_size,
            dict.fromkeys(LayerKind, (config.num_kv_heads, config.head_dim)),
            self.ops.kv_dtype,
            self.device,
        )
