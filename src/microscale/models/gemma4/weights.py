"""Gemma 4 weights from a checkpoint: MXFP8 as nvidia-modelopt exports it, plain BF16, or a part in each.

A matrix in MXFP8 is ``X.weight`` E4M3 [N, K] with ``X.weight_scale`` E8M0 [N, K / 32]. Its experts are apart,
``experts.7.gate_proj``; BF16 ones are two tensors, ``experts.gate_up_proj`` [E, 2I, H] and ``experts.down_proj``. q, k
and v, and gate and up, are joined as they are read. What sees and hears is left out by name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from microscale.errors import BadCheckpoint
from microscale.formats import BLOCK, MXFP8, BlockScaled
from microscale.models.checkpoint import Checkpoint, FromCheckpoint, TensorSpec, check_overrides
from microscale.models.gemma4.config import Gemma4Config
from microscale.models.gemma4.config_file import read_gemma4
from microscale.models.gemma4.parts import rank_parts
from microscale.models.gemma4.quantization import PREFIXES
from microscale.models.gemma4.tensors import Gemma4Layer, Weight
from microscale.models.sharded_checkpoint import ShardedCheckpoint
from microscale.parallel.sharding import WHOLE, Shard

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

OTHER_SENSES = ("vision_tower", "embed_vision", "audio_tower", "embed_audio", "multi_modal_projector")
"""Parts of the model that are not computed here."""
LM_HEAD = "lm_head.weight"
_BF16 = ("BF16",)
# Norms and the router's scales are BF16 as published; trainers keep them in float32.
_SMALL = ("BF16", "F32")
_E4M3 = ("F8_E4M3",)
_E8M0 = ("U8", "F8_E8M0")
_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    "post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2",
)  # fmt: skip


class Gemma4Checkpoint(FromCheckpoint):
    """A ``Gemma4Weights`` that reads a checkpoint. ``prefix`` stands before the names of all tensors but lm_head's."""

    def __init__(self, config: Gemma4Config, checkpoint: Checkpoint, prefix: str, specs: Sequence[TensorSpec]) -> None:
        super().__init__(checkpoint, specs)
        self.config = config
        self._prefix = prefix

    def embed(self, device: torch.device | str) -> Tensor:
        return self._read("embed_tokens.weight", device)

    def norm(self, device: torch.device | str) -> Tensor:
        return self._read("norm.weight", device)

    def lm_head(self, device: torch.device | str) -> Tensor:
        return self._checkpoint.read(LM_HEAD, device)

    def layer(self, layer_idx: int, device: torch.device | str) -> Gemma4Layer:
        config, prefix = self.config, f"layers.{layer_idx}."
        formats = config.formats[layer_idx]

        def read(name: str) -> Tensor:
            return self._read(prefix + name, device)

        def joined(names: Sequence[str], fmt: str) -> Weight:
            return self._joined([prefix + name for name in names], fmt, device)

        def experts(name: str, parts: Sequence[str]) -> Weight:
            if formats.experts == "bf16" and f"{self._prefix}{prefix}{name}" in self._checkpoint.entries:
                return read(name)
            names = [[f"{prefix}experts.{e}.{part}" for part in parts] for e in range(config.num_experts)]
            return self._stacked(names, formats.experts, device)

        shared = config.heads[config.layer_kinds[layer_idx]].shared_kv
        return Gemma4Layer(
            attn_norm=read("input_layernorm.weight"),
            qkv=joined([f"self_attn.{part}_proj" for part in ("qk" if shared else "qkv")], formats.qkv),
            q_norm=read("self_attn.q_norm.weight"),
            k_norm=read("self_attn.k_norm.weight"),
            o=joined(["self_attn.o_proj"], formats.o),
            attn_out_norm=read("post_attention_layernorm.weight"),
            mlp_norm=read("pre_feedforward_layernorm.weight"),
            gate_up=joined(["mlp.gate_proj", "mlp.up_proj"], formats.gate_up),
            down=joined(["mlp.down_proj"], formats.down),
            mlp_out_norm=read("post_feedforward_layernorm_1.weight"),
            experts_norm=read("pre_feedforward_layernorm_2.weight"),
            router_scale=read("router.scale"),
            router=read("router.proj.weight"),
            expert_scale=read("router.per_expert_scale"),
            experts_gate_up=experts("experts.gate_up_proj", ("gate_proj", "up_proj")),
            experts_down=experts("experts.down_proj", ("down_proj",)),
            experts_out_norm=read("post_feedforward_layernorm_2.weight"),
            both_norm=read("post_feedforward_layernorm.weight"),
            scalar=float(read("layer_scalar")),
        )

    def _read(self, name: str, device: torch.device | str) -> Tensor:
        return self._checkpoint.read(self._prefix + name, device)

    def _matrix(self, name: str, fmt: str, device: torch.device | str) -> tuple[Tensor, ...]:
        """The tensors of one matrix: its numbers, or its codes and scales as bytes."""
        weight = self._read(f"{name}.weight", device)
        if fmt == "bf16":
            return (weight,)
        return weight.view(torch.uint8), self._read(f"{name}.weight_scale", device).view(torch.uint8)

    def _joined(self, names: Sequence[str], fmt: str, device: torch.device | str) -> Weight:
        """Matrices one below the other."""
        parts = [self._matrix(name, fmt, device) for name in names]
        return _weight([torch.cat(tensors) if len(parts) > 1 else tensors[0] for tensors in zip(*parts, strict=True)])

    def _stacked(self, names: Sequence[Sequence[str]], fmt: str, device: torch.device | str) -> Weight:
        """One joined matrix for each expert. The whole is allocated once, and beside it there is one expert."""
        whole: list[Tensor] = []
        for expert, parts in enumerate(names):
            for tensors in _with_starts(self._matrix(name, fmt, device) for name in parts):
                for at, (start, tensor) in enumerate(tensors):
                    if len(whole) <= at:
                        rows = tensor.shape[0] * len(parts)  # gate and up have as many rows
                        whole.append(tensor.new_empty((len(names), rows, tensor.shape[1])))
                    whole[at][expert, start : start + tensor.shape[0]] = tensor
        return _weight(whole)


def _with_starts(parts: Iterator[tuple[Tensor, ...]]) -> Iterator[list[tuple[int, Tensor]]]:
    """Each tensor with the row at which it begins below the parts before."""
    start = 0
    for tensors in parts:
        yield [(start, tensor) for tensor in tensors]
        start += tensors[0].shape[0]


def _weight(tensors: Sequence[Tensor]) -> Weight:
    return tensors[0] if len(tensors) == 1 else BlockScaled(tensors[0], tensors[1], MXFP8)


def tensor_specs(c: Gemma4Config, prefix: str, *, experts_apart: bool) -> list[TensorSpec]:
    """Every tensor of the text model in such a checkpoint, in the order in which the model is built.

    ``experts_apart``: each expert on its own, also in BF16.
    """
    specs = [TensorSpec(f"{prefix}embed_tokens.weight", (c.vocab_size, c.hidden), _BF16)]
    for layer_idx in range(c.num_layers):
        specs += _layer_specs(c, layer_idx, f"{prefix}layers.{layer_idx}.", experts_apart)
    specs.append(TensorSpec(f"{prefix}norm.weight", (c.hidden,), _SMALL))
    if not c.tied:
        specs.append(TensorSpec(LM_HEAD, (c.vocab_size, c.hidden), _BF16))
    return specs


def _layer_specs(c: Gemma4Config, layer_idx: int, prefix: str, experts_apart: bool) -> list[TensorSpec]:
    formats, heads = c.formats[layer_idx], c.heads[c.layer_kinds[layer_idx]]
    q_rows, kv_rows = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    specs = [TensorSpec(f"{prefix}{name}.weight", (c.hidden,), _SMALL) for name in _NORMS]
    specs += [TensorSpec(f"{prefix}self_attn.{name}_norm.weight", (heads.head_dim,), _SMALL) for name in "qk"]
    specs += [
        TensorSpec(f"{prefix}layer_scalar", (1,), _SMALL),
        TensorSpec(f"{prefix}router.proj.weight", (c.num_experts, c.hidden), _SMALL),
        TensorSpec(f"{prefix}router.scale", (c.hidden,), _SMALL),
        TensorSpec(f"{prefix}router.per_expert_scale", (c.num_experts,), _SMALL),
    ]
    specs += _linear(f"{prefix}self_attn.q_proj", q_rows, c.hidden, formats.qkv)
    for part in "k" if heads.shared_kv else "kv":
        specs += _linear(f"{prefix}self_attn.{part}_proj", kv_rows, c.hidden, formats.qkv)
    specs += _linear(f"{prefix}self_attn.o_proj", c.hidden, q_rows, formats.o)
    for part in ("gate", "up"):
        specs += _linear(f"{prefix}mlp.{part}_proj", c.mlp, c.hidden, formats.gate_up)
    specs += _linear(f"{prefix}mlp.down_proj", c.hidden, c.mlp, formats.down)
    if formats.experts == "bf16" and not experts_apart:
        gate_up = (c.num_experts, 2 * c.intermediate, c.hidden)
        down = (c.num_experts, c.hidden, c.intermediate)
        return [
            *specs,
            TensorSpec(f"{prefix}experts.gate_up_proj", gate_up, _BF16),
            TensorSpec(f"{prefix}experts.down_proj", down, _BF16),
        ]
    for expert in range(c.num_experts):
        for part in ("gate", "up"):
            specs += _linear(f"{prefix}experts.{expert}.{part}_proj", c.intermediate, c.hidden, formats.experts)
    for expert in range(c.num_experts):
        specs += _linear(f"{prefix}experts.{expert}.down_proj", c.hidden, c.intermediate, formats.experts)
    return specs


def _linear(name: str, rows: int, columns: int, fmt: str) -> list[TensorSpec]:
    if fmt == "bf16":
        return [TensorSpec(f"{name}.weight", (rows, columns), _BF16)]
    # Rows of a shape that blocks do not fill are refused here by name: the scales could not have it.
    return [
        TensorSpec(f"{name}.weight", (rows, columns), _E4M3),
        TensorSpec(f"{name}.weight_scale", (rows, -(-columns // BLOCK)), _E8M0),
    ]


def open_gemma4(folder: Path, overrides: Mapping[str, object], shard: Shard = WHOLE) -> Gemma4Checkpoint:
    """The checkpoint in ``folder``, checked in full against its own config; overrides may leave layers out or change
    constants, but not the shape of a tensor. ``shard``: what one rank reads of it."""
    config = read_gemma4(folder, overrides)
    checkpoint = Checkpoint(folder)
    prefix = _find_prefix(checkpoint)
    apart = f"{prefix}layers.0.experts.0.gate_proj.weight" in checkpoint.entries
    whole = tensor_specs(read_gemma4(folder), prefix, experts_apart=apart)
    num_left_out = checkpoint.check(whole, tuple(f"{p}{part}." for p in ("", "model.") for part in OTHER_SENSES))
    asked = tensor_specs(config, prefix, experts_apart=apart)
    check_overrides(folder, overrides, whole, asked)
    if num_left_out:
        log.info("%s: only text is computed; %d tensors of pictures and sound are left out.", folder, num_left_out)
    if not shard.is_whole:
        checkpoint = ShardedCheckpoint(checkpoint, rank_parts(config, prefix, LM_HEAD, shard, experts_apart=apart))
    return Gemma4Checkpoint(config.sharded(shard), checkpoint, prefix, asked)


def _find_prefix(checkpoint: Checkpoint) -> str:
    for prefix in PREFIXES:
        if f"{prefix}embed_tokens.weight" in checkpoint.entries:
            return prefix
    names = ", ".join(repr(f"{prefix}embed_tokens.weight") for prefix in PREFIXES)
    raise BadCheckpoint(f"{checkpoint.folder} lacks the embedding table; it would be called {names}.")
