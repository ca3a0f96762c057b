"""Qwen3-MoE: the same code runs on plain references and on the fast kernels.

A decoder layer is: norm, fused QKV, a norm of each head of queries and keys, rotary positions, paged attention over the
whole context, output projection; norm, router, mixture of experts. Everything is added to the residual stream. There
are no biases, no windows and no sinks.
"""

from __future__ import annotations

from microscale.models.pre_norm import PreNormLayer, PreNormModel, attention_spec, small_spec
from microscale.models.qwen3_moe.config import Qwen3MoeConfig
from microscale.models.qwen3_moe.weights import Qwen3MoeLayer
from microscale.models.rope import rope_table
from microscale.planning.ops import DenseWeights, Gate, GateKind, HeadNorms, RopeTable, Router

GATE = Gate(GateKind.SILU, interleaved=False)


class Qwen3Moe(PreNormModel[Qwen3MoeConfig, Qwen3MoeLayer]):
    """The whole model."""

    def bind_layer(self, layer_idx: int, tensors: Qwen3MoeLayer) -> PreNormLayer:
        config, ops = self.config, self.ops
        kind = config.layer_kinds[layer_idx]
        dtype, epsilon = ops.dtype, config.rms_epsilon
        attention = attention_spec(config, kind, ops, self.page_size, sinks=False)
        return PreNormLayer(
            kind=kind,
            config=config,
            attn_norm=tensors.attn_norm.to(dtype),
            qkv=ops.dense("qkv", DenseWeights(tensors.qkv), behind_sum=True),
            head_norms=HeadNorms(tensors.q_norm.to(dtype), tensors.k_norm.to(dtype), epsilon, values=False),
            attention=ops.attention(kind.value, attention, None),
            o=ops.dense("o", DenseWeights(tensors.o)),
            mlp_norm=tensors.mlp_norm.to(dtype),
            # Softmax over all experts, renormalised over the chosen: the same as a softmax over those.
            router=Router(tensors.router.to(dtype)),
            experts=ops.experts("experts", tensors.gate_up, tensors.down, config.top_k, GATE),
            small=ops.small(small_spec(config, ops)),
            ranks=ops.ranks,
        )

    def rope_table(self) -> RopeTable:
        return rope_table(self.config.rope, self.config.head_dim, self.device)
