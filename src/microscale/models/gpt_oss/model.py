"""gpt-oss, once: the same code runs on plain references and on the fast kernels.

A decoder layer is: norm, fused QKV, rotary positions, paged attention with a learned sink per head (every other layer
sees only a window), output projection; norm, router, mixture of experts. Everything is added to the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from microscale.backends.ops import (
    AttentionSpec,
    DenseWeights,
    Gate,
    GateKind,
    Logits,
    MoeWeights,
    Ops,
    PagedKv,
    RopeTable,
    Router,
    SmallSpec,
)
from microscale.models.batch import ForwardBatch, KvCache, LogitRows
from microscale.models.config import LayerKind
from microscale.models.gpt_oss.config import GptOssConfig
from microscale.models.gpt_oss.tensors import GptOssWeights, LayerTensors
from microscale.models.rope import yarn_table


class DecoderLayer:
    """One layer, bound to its kernels."""

    def __init__(self, config: GptOssConfig, kind: LayerKind, tensors: LayerTensors, ops: Ops, page_size: int) -> None:
        self.config = config
        self.kind = kind
        self.attn_norm = tensors.attn_norm
        self.mlp_norm = tensors.mlp_norm
        # Bound in the order in which they run: see ``models/outline.py``.
        self.qkv = ops.dense("qkv", DenseWeights(tensors.qkv_weight, tensors.qkv_bias))
        self.attention = ops.attention(kind.value, attention_spec(config, kind, ops, page_size), tensors.sinks)
        self.o = ops.dense("o", DenseWeights(tensors.o_weight, tensors.o_bias))
        self.router = Router(tensors.router_weight.to(ops.dtype), tensors.router_bias.to(ops.dtype))
        self.experts = ops.moe(
            MoeWeights(tensors.gate_up, tensors.down, tensors.gate_up_bias, tensors.down_bias),
            config.top_k,
            Gate(GateKind.SWIGLU_CLAMPED, interleaved=True, alpha=config.swiglu_alpha, limit=config.swiglu_limit),
        )
        self.small = ops.small(small_spec(config, ops))
        self.uses = {"qkv": "qkv", "o": "o", "experts": "experts", "attention": kind.value}
        """What plans call the bound parts."""

    def forward(
        self,
        x: Tensor,
        added: Tensor | None,
        batch: ForwardBatch,
        kv: PagedKv,
        rope: RopeTable,
        only: LogitRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``x [tokens, hidden]``, the residual stream, and what is still to be added to it, one layer on; for the
        tokens of ``only``, if given.

        Each sum is left to the norm that reads it: one launch for both.
        """
        config, small = self.config, self.small
        if added is None:
            normed = small.rms_norm(x, self.attn_norm, config.rms_epsilon)
        else:
            normed, x = small.add_rms_norm(added, x, self.attn_norm, config.rms_epsilon)
        qkv = self.qkv(normed).view(x.shape[0], -1, config.head_dim)
        queries = batch.attention[self.kind]
        if only is None and self.attention.refuses_heads(qkv, None, kv, queries) is None:
            attended = self.attention.from_heads(qkv, rope, None, kv, queries)
        else:
            q = small.rope_and_write_kv(qkv, config.num_heads, batch.positions, rope, kv, batch.slots[self.kind])
            if only is not None:
                q, x, queries = q[only.rows], x[only.rows], only.attention[self.kind]
                if not x.shape[0]:
                    return x, x
            attended = self.attention(q, kv, queries)
        added = self.o(attended.flatten(1))
        normed, x, routing = small.add_norm_route(
            added, x, self.mlp_norm, config.rms_epsilon, self.router, config.top_k
        )
        return x, self.experts(normed, routing)


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


class GptOss:
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
        self.layers: list[DecoderLayer] = []
        for layer_idx, kind in enumerate(config.layer_kinds):
            self.layers.append(DecoderLayer(config, kind, weights.layer(layer_idx, device), ops, page_size))
            on_layer()
        self.norm = weights.norm(device)
        self.lm_head = ops.dense("lm_head", DenseWeights(weights.lm_head(device)))
        self.sampling = ops.sampling(config.vocab_size)
        self.rope = yarn_table(config.rope, config.head_dim, device)
        self.small = self.layers[-1].small

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

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KvCache) -> Logits:
        """Logits ``[rows, vocabulary]`` in float32 for ``batch.logits``; the new tokens' KV goes to the cache."""
        x = self.embed(batch.token_ids)
        added: Tensor | None = None
        for layer, layer_kv in zip(self.layers, kv.layers, strict=True):
            only = batch.logits if layer is self.layers[-1] else None
            x, added = layer.forward(x, added, batch, layer_kv, self.rope, only)
        assert added is not None  # there is a layer
        x, _ = self.small.add_rms_norm(added, x, self.norm, self.config.rms_epsilon)
        return self.lm_head.logits(x)
