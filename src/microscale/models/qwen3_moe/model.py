"""Qwen3-MoE, once: the same code runs on plain references and on the fast kernels.

A decoder layer is: norm, fused QKV, a norm of each head of queries and keys, rotary positions, paged attention over the
whole context, output projection; norm, router, mixture of experts. Everything is added to the residual stream. There
are no biases, no windows and no sinks.
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
    HeadNorms,
    Logits,
    Ops,
    PagedKv,
    RopeTable,
    Router,
    SmallSpec,
)
from microscale.models.batch import ForwardBatch, KvCache, LogitRows
from microscale.models.config import LayerKind
from microscale.models.qwen3_moe.config import Qwen3MoeConfig
from microscale.models.qwen3_moe.tensors import Qwen3MoeLayer, Qwen3MoeWeights
from microscale.models.rope import rope_table

FULL = LayerKind.FULL
GATE = Gate(GateKind.SILU, interleaved=False)


class Qwen3MoeDecoderLayer:
    """One layer, bound to its kernels."""

    def __init__(self, config: Qwen3MoeConfig, tensors: Qwen3MoeLayer, ops: Ops, page_size: int) -> None:
        self.config = config
        dtype = ops.dtype
        self.attn_norm = tensors.attn_norm.to(dtype)
        self.mlp_norm = tensors.mlp_norm.to(dtype)
        self.head_norms = HeadNorms(
            tensors.q_norm.to(dtype), tensors.k_norm.to(dtype), config.rms_epsilon, values=False
        )
        # Bound in the order in which they run: see ``models/outline.py``.
        self.qkv = ops.dense("qkv", DenseWeights(tensors.qkv))
        self.attention = ops.attention(FULL.value, attention_spec(config, ops, page_size), None)
        self.o = ops.dense("o", DenseWeights(tensors.o))
        # Softmax over all experts, renormalised over the chosen: the same as a softmax over those.
        self.router = Router(tensors.router.to(dtype))
        self.experts = ops.experts("experts", tensors.gate_up, tensors.down, config.top_k, GATE)
        self.small = ops.small(small_spec(config, ops))
        self.uses = {"qkv": "qkv", "o": "o", "experts": "experts", "attention": FULL.value}
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
        queries = batch.attention[FULL]
        if only is None and self.attention.refuses_heads(qkv, self.head_norms, kv, queries) is None:
            attended = self.attention.from_heads(qkv, rope, self.head_norms, kv, queries)
        else:
            q = small.rope_and_write_kv(
                qkv, config.num_heads, batch.positions, rope, kv, batch.slots[FULL], self.head_norms
            )
            if only is not None:
                q, x, queries = q[only.rows], x[only.rows], only.attention[FULL]
                if not x.shape[0]:
                    return x, x
            attended = self.attention(q, kv, queries)
        added = self.o(attended.flatten(1))
        normed, x, routing = small.add_norm_route(
            added, x, self.mlp_norm, config.rms_epsilon, self.router, config.top_k
        )
        return x, self.experts(normed, routing)


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


class Qwen3Moe:
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
        self.layers: list[Qwen3MoeDecoderLayer] = []
        for layer_idx in range(config.num_layers):
            self.layers.append(Qwen3MoeDecoderLayer(config, weights.layer(layer_idx, device), ops, page_size))
            on_layer()
        self.norm = weights.norm(device).to(ops.dtype)
        self.lm_head = ops.dense("lm_head", DenseWeights(table if config.tied else weights.lm_head(device)))
        self.sampling = ops.sampling(config.vocab_size)
        self.rope = rope_table(config.rope, config.head_dim, device)
        self.small = self.layers[-1].small

    def new_cache(self, num_pages: dict[LayerKind, int]) -> KvCache:
        """An empty KV cache with this many pages; no layer slides."""
        config = self.config
        shapes = {FULL: (config.num_kv_heads, config.head_dim)}
        return KvCache.allocate(config.layer_kinds, num_pages, self.page_size, shapes, self.ops.kv_dtype, self.device)

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
