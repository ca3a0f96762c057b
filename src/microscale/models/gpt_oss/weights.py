"""The tensors of gpt-oss, in the Hugging Face and in the original layout.

Both layouts hold the same numbers. Experts are MXFP4 ``blocks`` u8 [E, rows, K / 32, 16] with ``scales`` u8
[E, rows, K / 32]; the rest is BF16. Hugging Face has q, k and v apart, the original has them in one tensor.

Fine-tunes may be in BF16 as a whole, in Hugging Face's layout: their experts are [E, K, rows], the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from microscale.formats import MXFP4
from microscale.models.checkpoint import Checkpoint
from microscale.models.gpt_oss.config import CheckpointLayout, GptOssConfig, read_config
from microscale.models.sharding import RankSplit, first_rank_only, kv_heads, q_heads, qkv_heads, width
from microscale.models.storage import BF16, BF16_OR_F32, TRANSPOSED, Storage, Weight, mxfp4_blocks
from microscale.models.tensor_table import (
    MATRIX,
    Draw,
    TensorRow,
    TensorSource,
    TensorTable,
    end_rows,
    vector,
)
from microscale.models.weights import CheckpointWeights, open_checkpoint
from microscale.parallel.sharding import WHOLE, Shard

if TYPE_CHECKING:
    from torch import Tensor

BIAS = Draw(std=0.1)
SINK = Draw(std=1.0)


@dataclass(frozen=True)
class GptOssLayer:
    """The tensors of one decoder layer. H hidden, I intermediate, E experts."""

    attn_norm: Tensor  # [H]
    qkv_weight: Tensor  # [(heads + 2 * kv_heads) * head_dim, H], all of q, then k, then v
    qkv_bias: Tensor  # [(heads + 2 * kv_heads) * head_dim]
    sinks: Tensor  # [heads]
    o_weight: Tensor  # [H, heads * head_dim]
    o_bias: Tensor  # [H]
    mlp_norm: Tensor  # [H]
    router_weight: Tensor  # [E, H]
    router_bias: Tensor  # [E]
    gate_up: Weight  # [E, 2I, H], gate rows even, up rows odd
    gate_up_bias: Tensor  # [E, 2I]
    down: Weight  # [E, H, I]
    down_bias: Tensor  # [E, H]


@dataclass(frozen=True)
class Names:
    """What a layout calls its tensors."""

    embed: str
    norm: str
    lm_head: str
    layer: str
    """Precedes the names of a layer's tensors, which follow."""
    attn_norm: str
    qkv: tuple[str, ...]
    """One tensor with all rows, or q, k and v."""
    sinks: str
    o: str
    mlp_norm: str
    router: str
    gate_up: str
    down: str
    experts: Storage
    norms: Storage


NAMES: dict[CheckpointLayout, Names] = {
    CheckpointLayout.HUGGING_FACE: Names(
        embed="model.embed_tokens.weight",
        norm="model.norm.weight",
        lm_head="lm_head.weight",
        layer="model.layers.{}.",
        attn_norm="input_layernorm.weight",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        sinks="self_attn.sinks",
        o="self_attn.o_proj",
        mlp_norm="post_attention_layernorm.weight",
        router="mlp.router",
        gate_up="mlp.experts.gate_up_proj",
        down="mlp.experts.down_proj",
        experts=mxfp4_blocks("_"),
        norms=BF16,
    ),
    CheckpointLayout.ORIGINAL: Names(
        embed="embedding.weight",
        norm="norm.scale",
        lm_head="unembedding.weight",
        layer="block.{}.",
        attn_norm="attn.norm.scale",
        qkv=("attn.qkv",),
        sinks="attn.sinks",
        o="attn.out",
        mlp_norm="mlp.norm.scale",
        router="mlp.gate",
        gate_up="mlp.mlp1",
        down="mlp.mlp2",
        experts=mxfp4_blocks("_weight."),
        norms=BF16_OR_F32,  # OpenAI's own model keeps them in float32, and so may what is saved from it
    ),
}


def tensor_table(c: GptOssConfig, layout: CheckpointLayout = CheckpointLayout.HUGGING_FACE) -> TensorTable[GptOssLayer]:
    names = NAMES[layout]
    ends = end_rows(c, names.embed, names.norm, names.lm_head, names.norms)
    return TensorTable(GptOssLayer, names.layer, [_layer(c, names)] * c.num_layers, ends)


def _layer(c: GptOssConfig, names: Names) -> list[TensorRow]:
    """Gate rows are even and up rows odd, so that a share of the width is one run of twice as many rows."""
    heads = (c.num_heads, c.num_kv_heads, c.head_dim)
    hidden, experts, q_rows = c.hidden, c.num_experts, c.num_heads * c.head_dim
    gate_up = TensorSource(names.gate_up, (experts, 2 * c.intermediate, hidden), width(c.intermediate, 1, each=2))
    down = TensorSource(names.down, (experts, hidden, c.intermediate), width(c.intermediate, 2))
    storage = names.experts if c.expert_format == MXFP4.name else TRANSPOSED

    def qkv(field: str, part: str, columns: tuple[int, ...], draw: Draw = MATRIX) -> TensorRow:
        rows, splits = [c.qkv_rows], [qkv_heads(*heads)]
        if len(names.qkv) > 1:
            rows = [count * c.head_dim for count in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
            splits = [q_heads(*heads), kv_heads(*heads), kv_heads(*heads)]
        parts = zip(names.qkv, rows, splits, strict=True)
        sources = tuple(TensorSource(f"{name}.{part}", (count, *columns), split) for name, count, split in parts)
        return TensorRow(field, sources, draw=draw)

    def row(field: str, name: str, *shape: int, split: RankSplit | None = None, draw: Draw = MATRIX) -> TensorRow:
        return TensorRow(field, (TensorSource(name, shape, split),), draw=draw)

    return [
        vector("attn_norm", names.attn_norm, hidden, names.norms),
        qkv("qkv_weight", "weight", (hidden,)),
        qkv("qkv_bias", "bias", (), BIAS),
        row("sinks", names.sinks, c.num_heads, split=q_heads(c.num_heads, c.num_kv_heads, 1), draw=SINK),
        row("o_weight", f"{names.o}.weight", hidden, q_rows, split=q_heads(*heads, axis=1)),
        row("o_bias", f"{names.o}.bias", hidden, split=first_rank_only(hidden), draw=BIAS),
        vector("mlp_norm", names.mlp_norm, hidden, names.norms),
        row("router_weight", f"{names.router}.weight", experts, hidden),
        row("router_bias", f"{names.router}.bias", experts, draw=BIAS),
        TensorRow("gate_up", (gate_up,), storage),
        row("gate_up_bias", f"{names.gate_up}_bias", *gate_up.shape[:2], split=gate_up.split, draw=BIAS),
        TensorRow("down", (down,), storage),
        row("down_bias", f"{names.down}_bias", experts, hidden, split=first_rank_only(hidden, axis=1), draw=BIAS),
    ]


def open_gpt_oss(
    folder: Path, overrides: Mapping[str, object], shard: Shard = WHOLE
) -> CheckpointWeights[GptOssConfig, GptOssLayer]:
    """One rank's part of the checkpoint in ``folder``."""
    file = read_config(folder, overrides)
    table = partial(tensor_table, layout=file.layout)
    return open_checkpoint(Checkpoint(folder), read_config(folder).config, file.config, table, overrides, shard)
