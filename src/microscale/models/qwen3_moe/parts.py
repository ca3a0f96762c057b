"""What one rank reads of a Qwen3-MoE checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from microscale.formats import BLOCK
from microscale.models import split
from microscale.models.qwen3_moe.config import Qwen3MoeConfig
from microscale.models.reading.parts import Part
from microscale.parallel.sharding import Shard, split_heads, split_width


def rank_parts(c: Qwen3MoeConfig, lm_head: str, shard: Shard, *, apart: bool) -> Mapping[str, Part]:
    """``c`` is the whole model's. Routers, norms and the embedding table are read by every rank."""
    found = {} if c.tied else {lm_head: split.vocabulary(c.vocab_size, shard)}
    of_layer = _matrices(c, shard, apart)
    for layer_idx in range(c.num_layers):
        found |= {f"model.layers.{layer_idx}.{name}": part for name, part in of_layer.items()}
    return found


def _matrices(c: Qwen3MoeConfig, shard: Shard, apart: bool) -> dict[str, Part]:
    share, width = split_heads(c.num_heads, c.num_kv_heads, shard), split_width(c.intermediate, BLOCK, shard)
    found = {"self_attn.q_proj.weight": split.heads(share.heads, c.head_dim)}
    for name in "kv":
        found[f"self_attn.{name}_proj.weight"] = split.heads(share.kv_heads, c.head_dim)
    found["self_attn.o_proj.weight"] = split.heads(share.heads, c.head_dim, axis=1)
    if not apart:
        gate_up = split.gate_and_up(c.intermediate, shard, 1)
        return found | {"mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": split.width(width, 2)}
    for expert in range(c.num_experts):
        for name in ("gate", "up"):
            found[f"mlp.experts.{expert}.{name}_proj.weight"] = split.width(width, 0)
        found[f"mlp.experts.{expert}.down_proj.weight"] = split.width(width, 1)
    return found
