"""The tensors of Qwen3-MoE: BF16, or quantised in any container of ``models/storage``.

BF16 experts are a module each, ``experts.7.gate_proj.weight`` [I, H], as published and as transformers saves them; or
two tensors, ``experts.gate_up_proj`` [E, 2I, H] and ``experts.down_proj`` [E, H, I], as transformers 5 holds them in
memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from microscale.models.checkpoint import Checkpoint
from microscale.models.config import read_config_file
from microscale.models.quantization import read_quantisation
from microscale.models.qwen3_moe.config import PREFIXES, Qwen3MoeConfig, read_config
from microscale.models.sharding import kv_heads, q_heads
from microscale.models.storage import BF16_OR_F32, DUMMY, Storage, Weight, storages
from microscale.models.tensor_table import (
    ExpertTensorShape,
    TensorRow,
    TensorSource,
    TensorTable,
    end_rows,
    expert_rows,
    vector,
)
from microscale.models.weights import CheckpointWeights, open_checkpoint
from microscale.parallel.sharding import WHOLE, Shard

if TYPE_CHECKING:
    from torch import Tensor

LAYER = "model.layers.{}."


@dataclass(frozen=True)
class Qwen3MoeLayer:
    """The tensors of one decoder layer. H hidden, I width of an expert, E experts."""

    attn_norm: Tensor  # [H]
    qkv: Weight  # [(heads + 2 * kv_heads) * head_dim, H], all of q, then k, then v
    q_norm: Tensor  # [head_dim]
    k_norm: Tensor  # [head_dim]
    o: Weight  # [H, heads * head_dim]
    mlp_norm: Tensor  # [H]
    router: Tensor  # [E, H]
    gate_up: Weight  # [E, 2I, H], all gate rows, then all up rows
    down: Weight  # [E, H, I]


def tensor_table(
    c: Qwen3MoeConfig, modules: Mapping[str, Storage] = DUMMY, *, fused: bool = False
) -> TensorTable[Qwen3MoeLayer]:
    """``modules``: how those of each format are stored. ``fused``: the experts of a layer are two tensors."""
    head = modules[c.lm_head_format]
    ends = end_rows(c, "model.embed_tokens.weight", "model.norm.weight", "lm_head", head_storage=head)
    return TensorTable(Qwen3MoeLayer, LAYER, [_layer(c, modules, fused)] * c.num_layers, ends)


def _layer(c: Qwen3MoeConfig, modules: Mapping[str, Storage], fused: bool) -> list[TensorRow]:
    heads = (c.num_heads, c.num_kv_heads, c.head_dim)
    q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    q = TensorSource("self_attn.q_proj", (q_rows, c.hidden), q_heads(*heads))
    k, v = (TensorSource(f"self_attn.{part}_proj", (kv_rows, c.hidden), kv_heads(*heads)) for part in "kv")
    o = TensorSource("self_attn.o_proj", (c.hidden, q_rows), q_heads(*heads, axis=1))
    experts = ExpertTensorShape(c.num_experts, c.intermediate, c.hidden)
    return [
        vector("attn_norm", "input_layernorm.weight", c.hidden),
        TensorRow("qkv", (q, k, v), modules[c.qkv_format]),
        vector("q_norm", "self_attn.q_norm.weight", c.head_dim),
        vector("k_norm", "self_attn.k_norm.weight", c.head_dim),
        TensorRow("o", (o,), modules[c.o_format]),
        vector("mlp_norm", "post_attention_layernorm.weight", c.hidden),
        TensorRow("router", (TensorSource("mlp.gate.weight", (c.num_experts, c.hidden)),), BF16_OR_F32),
        *expert_rows(("gate_up", "down"), "mlp.experts", experts, modules[c.expert_format], fused=fused),
    ]


def open_qwen3_moe(
    folder: Path, overrides: Mapping[str, object], shard: Shard = WHOLE
) -> CheckpointWeights[Qwen3MoeConfig, Qwen3MoeLayer]:
    """One rank's part of the checkpoint in ``folder``."""
    config = read_config(folder, overrides)
    checkpoint = Checkpoint(folder)
    modules = storages(read_quantisation(folder, read_config_file(folder), PREFIXES).container)
    fused = f"{LAYER.format(0)}mlp.experts.gate_up_proj" in checkpoint.entries
    table = partial(tensor_table, modules=modules, fused=fused)
    return open_checkpoint(checkpoint, read_config(folder), config, table, overrides, shard, modules=modules)
