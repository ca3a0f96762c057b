"""Qwen3-MoE weights from a BF16 checkpoint.

Experts are apart, ``experts.7.gate_proj.weight`` [I, H], as published and as transformers saves them; or they are two
tensors, ``experts.gate_up_proj`` [E, 2I, H] and ``experts.down_proj`` [E, H, I], as transformers 5 holds them in
memory. q, k and v, and gate and up, are joined as they are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from microscale.models.checkpoint import Checkpoint, FromCheckpoint, TensorSpec, check_overrides
from microscale.models.qwen3_moe.config import Qwen3MoeConfig
from microscale.models.qwen3_moe.config_file import read_qwen3_moe
from microscale.models.qwen3_moe.parts import rank_parts
from microscale.models.qwen3_moe.tensors import Qwen3MoeLayer
from microscale.models.sharded_checkpoint import ShardedCheckpoint
from microscale.parallel.sharding import WHOLE, Shard

if TYPE_CHECKING:
    from torch import Tensor

EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
_BF16 = ("BF16",)
# Norms and routers are BF16 as published; trainers keep them in float32.
_SMALL = ("BF16", "F32")


class Qwen3MoeCheckpoint(FromCheckpoint):
    """A ``Qwen3MoeWeights`` that reads a checkpoint. ``apart``: it has a tensor for each matrix of each expert."""

    def __init__(
        self, config: Qwen3MoeConfig, checkpoint: Checkpoint, order: Sequence[TensorSpec], apart: bool
    ) -> None:
        super().__init__(checkpoint, order)
        self.config = config
        self._apart = apart

    def embed(self, device: torch.device | str) -> Tensor:
        return self._checkpoint.read(EMBED, device)

    def norm(self, device: torch.device | str) -> Tensor:
        return self._checkpoint.read(NORM, device)

    def lm_head(self, device: torch.device | str) -> Tensor:
        return self._checkpoint.read(LM_HEAD, device)

    def layer(self, layer_idx: int, device: torch.device | str) -> Qwen3MoeLayer:
        c = self.config

        def read(name: str) -> Tensor:
            return self._checkpoint.read(f"model.layers.{layer_idx}.{name}", device)

        def experts(joined: str, parts: Sequence[str], rows: int, columns: int) -> Tensor:
            """The whole is allocated once, and beside it there is one matrix."""
            if not self._apart:
                return read(f"mlp.experts.{joined}")
            whole = torch.empty((c.num_experts, len(parts), rows, columns), dtype=torch.bfloat16, device=device)
            for expert in range(c.num_experts):
                for place, part in enumerate(parts):
                    whole[expert, place] = read(f"mlp.experts.{expert}.{part}.weight")
            return whole.flatten(1, 2)

        return Qwen3MoeLayer(
            attn_norm=read("input_layernorm.weight"),
            qkv=torch.cat([read(f"self_attn.{part}_proj.weight") for part in "qkv"]),
            q_norm=read("self_attn.q_norm.weight"),
            k_norm=read("self_attn.k_norm.weight"),
            o=read("self_attn.o_proj.weight"),
            mlp_norm=read("post_attention_layernorm.weight"),
            router=read("mlp.gate.weight"),
            gate_up=experts("gate_up_proj", ("gate_proj", "up_proj"), c.intermediate, c.hidden),
            down=experts("down_proj", ("down_proj",), c.hidden, c.intermediate),
        )


def tensor_specs(c: Qwen3MoeConfig, *, apart: bool) -> list[TensorSpec]:
    """Every tensor of the checkpoint of such a model, in the order in which that is built."""
    specs = [TensorSpec(EMBED, (c.vocab_size, c.hidden), _BF16)]
    for layer_idx in range(c.num_layers):
        specs += _layer_specs(c, f"model.layers.{layer_idx}.", apart)
    specs.append(TensorSpec(NORM, (c.hidden,), _SMALL))
    if not c.tied:
        specs.append(TensorSpec(LM_HEAD, (c.vocab_size, c.hidden), _BF16))
    return specs


def _layer_specs(c: Qwen3MoeConfig, prefix: str, apart: bool) -> list[TensorSpec]:
    q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    small = {
        "input_layernorm": (c.hidden,),
        "post_attention_layernorm": (c.hidden,),
        "self_attn.q_norm": (c.head_dim,),
        "self_attn.k_norm": (c.head_dim,),
        "mlp.gate": (c.num_experts, c.hidden),
    }
    matrices = {
        "self_attn.q_proj": (q_rows, c.hidden),
        "self_attn.k_proj": (kv_rows, c.hidden),
        "self_attn.v_proj": (kv_rows, c.hidden),
        "self_attn.o_proj": (c.hidden, q_rows),
    }
    if apart:
        for expert in range(c.num_experts):
            for part in ("gate", "up"):
                matrices[f"mlp.experts.{expert}.{part}_proj"] = (c.intermediate, c.hidden)
        for expert in range(c.num_experts):
            matrices[f"mlp.experts.{expert}.down_proj"] = (c.hidden, c.intermediate)
    specs = [TensorSpec(f"{prefix}{name}.weight", shape, _SMALL) for name, shape in small.items()]
    specs += [TensorSpec(f"{prefix}{name}.weight", shape, _BF16) for name, shape in matrices.items()]
    if not apart:
        gate_up = (c.num_experts, 2 * c.intermediate, c.hidden)
        down = (c.num_experts, c.hidden, c.intermediate)
        specs.append(TensorSpec(f"{prefix}mlp.experts.gate_up_proj", gate_up, _BF16))
        specs.append(TensorSpec(f"{prefix}mlp.experts.down_proj", down, _BF16))
    return specs


def open_qwen3_moe(folder: Path, overrides: Mapping[str, object], shard: Shard = WHOLE) -> Qwen3MoeCheckpoint:
    """The checkpoint in ``folder``, checked in full against its own config; overrides may leave layers out or change
    constants, but not the shape of a tensor. ``shard``: what one rank reads of it."""
    config = read_qwen3_moe(folder, overrides)
    checkpoint = Checkpoint(folder)
    apart = "model.layers.0.mlp.experts.gate_up_proj" not in checkpoint.entries
    whole = tensor_specs(read_qwen3_moe(folder), apart=apart)
    checkpoint.check(whole)
    order = tensor_specs(config, apart=apart)
    check_overrides(folder, overrides, whole, order)
    if not shard.is_whole:
        checkpoint = ShardedCheckpoint(checkpoint, rank_parts(config, LM_HEAD, shard, apart=apart))
    return Qwen3MoeCheckpoint(config.sharded(shard), checkpoint, order, apart)
