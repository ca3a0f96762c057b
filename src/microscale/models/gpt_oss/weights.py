"""gpt-oss weights from a checkpoint in the Hugging Face or the original layout.

Both layouts hold the same numbers. Experts are MXFP4 ``blocks`` u8 [E, rows, K / 32, 16] with ``scales`` u8
[E, rows, K / 32]; the rest is BF16. Hugging Face keeps q, k and v apart, the original has them in one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from microscale.formats import BLOCK, MXFP4, BlockScaled
from microscale.models.checkpoint import Checkpoint, FromCheckpoint, TensorSpec, check_overrides
from microscale.models.gpt_oss.config import GptOssConfig
from microscale.models.gpt_oss.config_file import Layout, read_config, to_hugging_face
from microscale.models.gpt_oss.names import BF16, NAMES, Names
from microscale.models.gpt_oss.parts import rank_parts
from microscale.models.gpt_oss.tensors import LayerTensors
from microscale.models.random_checkpoint import Published
from microscale.models.sharded_checkpoint import ShardedCheckpoint
from microscale.parallel.sharding import WHOLE, Shard

if TYPE_CHECKING:
    from torch import Tensor

_BYTES = ("U8",)


class CheckpointWeights(FromCheckpoint):
    """A ``GptOssWeights`` that reads a checkpoint in either layout."""

    def __init__(self, config: GptOssConfig, checkpoint: Checkpoint, names: Names, order: Sequence[TensorSpec]) -> None:
        super().__init__(checkpoint, order)
        self.config = config
        self._names = names

    def embed(self, device: torch.device | str) -> Tensor:
        return self._checkpoint.read(self._names.embed, device)

    def norm(self, device: torch.device | str) -> Tensor:
        return self._checkpoint.read(self._names.norm, device)

    def lm_head(self, device: torch.device | str) -> Tensor:
        return self._checkpoint.read(self._names.lm_head, device)

    def layer(self, layer_idx: int, device: torch.device | str) -> LayerTensors:
        names = self._names

        def read(name: str) -> Tensor:
            return self._checkpoint.read(names.layer.format(layer_idx) + name, device)

        def qkv(part: str) -> Tensor:
            tensors = [read(f"{name}.{part}") for name in names.qkv]
            return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

        def experts(name: str) -> BlockScaled:
            # A block's 16 bytes follow the block before: dropping the last axis is a view.
            blocks, scales = (read(f"{name}{names.packed}{part}") for part in ("blocks", "scales"))
            return BlockScaled(blocks.flatten(-2), scales, MXFP4)

        return LayerTensors(
            attn_norm=read(names.attn_norm),
            qkv_weight=qkv("weight"),
            qkv_bias=qkv("bias"),
            sinks=read(names.sinks),
            o_weight=read(f"{names.o}.weight"),
            o_bias=read(f"{names.o}.bias"),
            mlp_norm=read(names.mlp_norm),
            router_weight=read(f"{names.router}.weight"),
            router_bias=read(f"{names.router}.bias"),
            gate_up=experts(names.gate_up),
            gate_up_bias=read(f"{names.gate_up}_bias"),
            down=experts(names.down),
            down_bias=read(f"{names.down}_bias"),
        )


def tensor_specs(c: GptOssConfig, names: Names) -> list[TensorSpec]:
    """Every tensor of the checkpoint of such a model, in the order in which that is built."""
    specs = [TensorSpec(names.embed, (c.vocab_size, c.hidden), BF16)]
    heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
    qkv_rows = [c.qkv_rows] if len(names.qkv) == 1 else [count * c.head_dim for count in heads]
    for layer in range(c.num_layers):
        prefix = names.layer.format(layer)
        specs += [
            TensorSpec(prefix + name, (c.hidden,), names.norm_dtypes) for name in (names.attn_norm, names.mlp_norm)
        ]
        for name, rows in zip(names.qkv, qkv_rows, strict=True):
            specs += _linear(prefix + name, rows, c.hidden)
        specs.append(TensorSpec(prefix + names.sinks, (c.num_heads,), BF16))
        specs += _linear(prefix + names.o, c.hidden, c.num_heads * c.head_dim)
        specs += _linear(prefix + names.router, c.num_experts, c.hidden)
        specs += _experts(prefix + names.gate_up, names.packed, c.num_experts, 2 * c.intermediate, c.hidden)
        specs += _experts(prefix + names.down, names.packed, c.num_experts, c.hidden, c.intermediate)
    return [
        *specs,
        TensorSpec(names.norm, (c.hidden,), names.norm_dtypes),
        TensorSpec(names.lm_head, (c.vocab_size, c.hidden), BF16),
    ]


def published(config: GptOssConfig) -> Published:
    """A checkpoint of this shape as OpenAI publishes it on the hub."""
    return Published(to_hugging_face(config), tensor_specs(config, NAMES[Layout.HUGGING_FACE]))


def open_gpt_oss(folder: Path, overrides: Mapping[str, object], shard: Shard = WHOLE) -> CheckpointWeights:
    """The checkpoint in ``folder``, checked in full against its own config; overrides may leave layers out or change
    constants, but not the shape of a tensor. ``shard``: what one rank reads of it."""
    file = read_config(folder, overrides)
    names = NAMES[file.layout]
    checkpoint = Checkpoint(folder)
    whole = tensor_specs(read_config(folder).config, names)
    checkpoint.check(whole)
    order = tensor_specs(file.config, names)
    check_overrides(folder, overrides, whole, order)
    config = file.config.sharded(shard)
    if not shard.is_whole:
        checkpoint = ShardedCheckpoint(checkpoint, rank_parts(file.config, names, shard))
    return CheckpointWeights(config, checkpoint, names, order)


def _linear(name: str, rows: int, columns: int) -> list[TensorSpec]:
    return [TensorSpec(f"{name}.weight", (rows, columns), BF16), TensorSpec(f"{name}.bias", (rows,), BF16)]


def _experts(name: str, packed: str, num_experts: int, rows: int, k: int) -> list[TensorSpec]:
    return [
        TensorSpec(f"{name}{packed}blocks", (num_experts, rows, k // BLOCK, BLOCK // 2), _BYTES),
        TensorSpec(f"{name}{packed}scales", (num_experts, rows, k // BLOCK), _BYTES),
        TensorSpec(f"{name}_bias", (num_experts, rows), BF16),
    ]
