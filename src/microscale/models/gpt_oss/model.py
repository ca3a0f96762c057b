"""gpt-oss: the same code runs on plain references and on the fast kernels.

A decoder layer is: norm, fused QKV, rotary positions, paged attention with a learned sink per head (every other layer
sees only a window), output projection; norm, router, mixture of experts. Everything is added to the residual stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from microscale.models.gpt_oss.config import GptOssConfig
from microscale.models.gpt_oss.weights import GptOssLayer
from microscale.models.pre_norm import PreNormLayer, PreNormModel, attention_spec, small_spec
from microscale.models.rope import yarn_table
from microscale.planning.ops import DenseWeights, Gate, GateKind, RopeTable, Router

if TYPE_CHECKING:
    from torch import Tensor


class GptOss(PreNormModel[GptOssConfig, GptOssLayer]):
    """The whole model."""

    def bind_layer(self, layer_idx: int, tensors: GptOssLayer) -> PreNormLayer:
        config, ops = self.config, self.ops
        kind = config.layer_kinds[layer_idx]
        attention = attention_spec(config, kind, ops, self.page_size, sinks=True)
        return PreNormLayer(
            kind=kind,
            config=config,
            attn_norm=tensors.attn_norm,
            qkv=ops.dense("qkv", DenseWeights(tensors.qkv_weight, tensors.qkv_bias), behind_sum=True),
            head_norms=None,
            attention=ops.attention(kind.value, attention, tensors.sinks),
            o=ops.dense("o", DenseWeights(tensors.o_weight, tensors.o_bias)),
            mlp_norm=tensors.mlp_norm,
            router=Router(tensors.router_weight.to(ops.dtype), tensors.router_bias.to(ops.dtype)),
            experts=ops.experts(
                "experts",
                tensors.gate_up,
                tensors.down,
                config.top_k,
                Gate(GateKind.SWIGLU_CLAMPED, interleaved=True, alpha=config.swiglu_alpha, limit=config.swiglu_limit),
                (tensors.gate_up_bias, tensors.down_bias),
            ),
            small=ops.small(small_spec(config, ops)),
            ranks=ops.ranks,
        )

    def bind_norm(self, weight: Tensor) -> None:
        """Norms keep the type that they have in the checkpoint."""
        self.norm = weight

    def rope_table(self) -> RopeTable:
        return yarn_table(self.config.rope, self.config.head_dim, self.device)
