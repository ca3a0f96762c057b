"""What one rank reads of a Gemma 4 checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from microscale.formats import BLOCK
from microscale.models import split
from microscale.models.gemma4.config import Gemma4Config
from microscale.models.reading.parts import Part
from microscale.parallel.sharding import Shard, split_heads, split_width


def rank_parts(c: Gemma4Config, prefix: str, lm_head: str, shard: Shard, *, experts_apart: bool) -> Mapping[str, Part]:
    """``c`` is the whole model's. Routers, norms, scales and the embedding table are read by every rank."""
    found = {} if c.tied else {lm_head: split.vocabulary(c.vocab_size, shard)}
    for layer_idx in range(c.num_layers):
        of_layer = _matrices(c, layer_idx, shard, experts_apart)
        found |= {f"{prefix}layers.{layer_idx}.{name}": part for name, part in of_layer.items()}
    return found


def _matrices(c: Gemma4Config, layer_idx: int, shard: Shard, experts_apart: bool) -> dict[str, Part]:
    formats, heads = c.formats[layer_idx], c.heads[c.layer_kinds[layer_idx]]
    share = split_heads(heads.num_heads, heads.num_kv_heads, shard)
    mlp, experts = (split_width(size, BLOCK, shard) for size in (c.mlp, c.intermediate))
    found = _rows("self_attn.q_proj", split.heads(share.heads, heads.head_dim), formats.qkv)
    for name in "k" if heads.shared_kv else "kv":
        found |= _rows(f"self_attn.{name}_proj", split.heads(share.kv_heads, heads.head_dim), formats.qkv)
    found |= _columns("self_attn.o_proj", split.heads(share.heads, heads.head_dim, axis=1), formats.o)
    for name in ("gate", "up"):
        found |= _rows(f"mlp.{name}_proj", split.width(mlp, 0), formats.gate_up)
    found |= _columns("mlp.down_proj", split.width(mlp, 1), formats.down)
    if formats.experts == "bf16" and not experts_apart:
        gate_up = split.gate_and_up(c.intermediate, shard, 1)
        return found | {"experts.gate_up_proj": gate_up, "experts.down_proj": split.width(experts, 2)}
    for expert in range(c.num_experts):
        for name in ("gate", "up"):
            found |= _rows(f"experts.{expert}.{name}_proj", split.width(experts, 0), formats.experts)
        found |= _columns(f"experts.{expert}.down_proj", split.width(experts, 1), formats.experts)
    return found


def _rows(name: str, part: Part, fmt: str) -> dict[str, Part]:
    """Rows of a matrix, and of its scales."""
    found = {f"{name}.weight": part}
    return found if fmt == "bf16" else found | {f"{name}.weight_scale": part}


def _columns(name: str, part: Part, fmt: str) -> dict[str, Part]:
    """Columns of a matrix; of its scales one for each block."""
    found = {f"{name}.weight": part}
    return found if fmt == "bf16" else found | {f"{name}.weight_scale": split.in_blocks(part)}
