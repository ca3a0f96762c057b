"""Draft heads from checkpoints in their published layouts. See ``config_file`` for who publishes them.

Numbers may be stored as BF16, F16 or F32 and are held in BF16. ``t2d``, the inverse of ``d2t``, is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from microscale.errors import BadCheckpoint
from microscale.models.checkpoint import Checkpoint, FromCheckpoint, TensorSpec
from microscale.models.config import ModelConfig
from microscale.models.draft_heads.config import DFlashConfig, Eagle3Config, HeadConfig, LayerShape, Reads
from microscale.models.draft_heads.tensors import DFlashTensors, Eagle3Tensors, LayerTensors
from microscale.models.sharding import vocabulary

if TYPE_CHECKING:
    from torch import Tensor

_NUMBERS = ("BF16", "F16", "F32")
MIDLAYER, LAYER = "midlayer.", "layers.{}."
"""What stands before the names of the only layer in EAGLE's own layout, and of each layer in the others."""
EMBED, LM_HEAD, D2T, T2D = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"


def layer_prefix(names: Sequence[str]) -> str:
    """What this checkpoint has before the names of a layer."""
    return MIDLAYER if any(name.startswith(MIDLAYER) for name in names) else LAYER


class _Head(FromCheckpoint):
    """What both kinds read alike."""

    def __init__(self, shape: LayerShape, checkpoint: Checkpoint, specs: list[TensorSpec]) -> None:
        super().__init__(checkpoint, specs)
        self._shape = shape
        self._prefix = layer_prefix(list(checkpoint.entries))

    def _read(self, name: str, device: torch.device) -> Tensor:
        return self._checkpoint.read(name, device).to(torch.bfloat16)

    def layer(self, layer_idx: int, device: torch.device) -> LayerTensors:
        shape, prefix = self._shape, self._prefix.format(layer_idx)

        def read(name: str) -> Tensor:
            return self._read(prefix + name, device)

        def joined(names: tuple[str, ...], part: str) -> Tensor:
            return torch.cat([read(f"{name}.{part}") for name in names])

        qkv = tuple(f"self_attn.{part}_proj" for part in "qkv")
        return LayerTensors(
            qkv=joined(qkv, "weight"),
            qkv_bias=joined(qkv, "bias") if shape.attention_bias else None,
            q_norm=read("self_attn.q_norm.weight") if shape.head_norms else None,
            k_norm=read("self_attn.k_norm.weight") if shape.head_norms else None,
            o=read("self_attn.o_proj.weight"),
            o_bias=read("self_attn.o_proj.bias") if shape.attention_bias else None,
            mlp_norm=read("post_attention_layernorm.weight"),
            gate_up=joined(("mlp.gate_proj", "mlp.up_proj"), "weight"),
            down=read("mlp.down_proj.weight"),
            input_norm=read("input_layernorm.weight"),
        )


class Eagle3Checkpoint(_Head):
    """An ``Eagle3Weights`` from a checkpoint that was checked."""

    def __init__(self, config: Eagle3Config, checkpoint: Checkpoint) -> None:
        super().__init__(config.layer, checkpoint, tensor_specs(config, layer_prefix(list(checkpoint.entries))))
        self.config = config

    def tensors(self, device: torch.device) -> Eagle3Tensors:
        c = self.config
        norms = fc_norms(c)
        return Eagle3Tensors(
            fc=self._read("fc.weight", device),
            fc_norm=torch.cat([self._read(name, device) for name in norms]) if norms else None,
            hidden_norm=self._read(self._prefix.format(0) + "hidden_norm.weight", device),
            layer=self.layer(0, device),
            norm=self._read("norm.weight", device),
            lm_head=self._read(LM_HEAD, device) if c.own_lm_head else None,
            embed=self._read(EMBED, device) if c.own_embedding else None,
            d2t=self._d2t(device) if c.maps_vocabulary else None,
        )

    def _d2t(self, device: torch.device) -> Tensor:
        """Refused where it leads out of the target's vocabulary: a draft would be no token."""
        d2t = self._checkpoint.read(D2T, device).to(torch.int64)
        ids = d2t + torch.arange(d2t.shape[0], device=device)
        vocab = self.config.reads.vocab_size
        wrong = ((ids < 0) | (ids >= vocab)).nonzero()
        if wrong.numel():
            at = int(wrong[0])
            raise BadCheckpoint(
                f"{self._checkpoint.folder}: {D2T!r} maps draft token {at} to {int(ids[at])}, and the target has a "
                f"vocabulary of {vocab}."
            )
        return d2t


class DFlashCheckpoint(_Head):
    """A ``DFlashWeights`` from a checkpoint that was checked."""

    def __init__(self, config: DFlashConfig, checkpoint: Checkpoint) -> None:
        super().__init__(config.layer, checkpoint, tensor_specs(config, layer_prefix(list(checkpoint.entries))))
        self.config = config

    def tensors(self, device: torch.device) -> DFlashTensors:
        return DFlashTensors(*(self._read(f"{name}.weight", device) for name in ("fc", "hidden_norm", "norm")))


def check_head(config: HeadConfig, checkpoint: Checkpoint) -> None:
    """Compare every tensor with the head's own config."""
    checkpoint.check(tensor_specs(config, layer_prefix(list(checkpoint.entries))), left_out=(T2D,))


def open_head(config: HeadConfig, checkpoint: Checkpoint) -> Eagle3Checkpoint | DFlashCheckpoint:
    """The weights of a checkpoint that was checked. A rank reads its rows of lm_head and all else."""
    if isinstance(config, DFlashConfig):
        return DFlashCheckpoint(config, checkpoint)
    if config.own_lm_head and not config.shard.is_whole:
        part = vocabulary(config.draft_vocab_size).part(config.shard)
        checkpoint = checkpoint.of_rank({LM_HEAD: part} if part is not None else {})
    return Eagle3Checkpoint(config, checkpoint)


def check_fit(config: HeadConfig, target: ModelConfig, name: str, prefix: str = LAYER) -> None:
    """Refuse a head that was made for another target: the tensor that does not fit, and both shapes."""
    behind = [tap for tap in config.reads.taps if tap > target.num_layers]
    if behind:
        raise BadCheckpoint(
            f"{name} reads its target behind layer {behind[0]}, and the target has {target.num_layers} layers."
        )
    asked = _for_target(config, target)
    for own, wanted in zip(tensor_specs(config, prefix), tensor_specs(asked, prefix), strict=True):
        if own.shape != wanted.shape:
            raise BadCheckpoint(
                f"{name} does not fit the target: tensor {own.name!r} has shape {list(own.shape)}, and a target of "
                f"{target.hidden} columns and {target.vocab_size} tokens asks for {list(wanted.shape)}."
            )
    shared = isinstance(config, DFlashConfig) or not (config.own_embedding and config.own_lm_head)
    if shared and config.layer.hidden != target.hidden:
        norm = next(spec for spec in tensor_specs(config, prefix) if spec.name == "norm.weight")
        raise BadCheckpoint(
            f"{name} does not fit the target: it takes the target's embedding or lm_head, tensor {norm.name!r} has "
            f"shape {list(norm.shape)}, and the target asks for {[target.hidden]}."
        )


def _for_target(config: HeadConfig, target: ModelConfig) -> HeadConfig:
    """The head as it would be for this target."""
    reads = Reads(config.reads.taps, target.hidden, target.vocab_size)
    if isinstance(config, DFlashConfig):
        return replace(config, reads=reads, mask_token=min(config.mask_token, target.vocab_size - 1))
    if config.maps_vocabulary:
        return replace(config, reads=reads)
    return replace(config, reads=reads, draft_vocab_size=target.vocab_size)


def fc_norms(c: Eagle3Config) -> list[str]:
    """The norms before ``fc``."""
    if c.norm_before_fc:
        return ["input_norm.weight"]
    return [f"fc_norm.{i}.weight" for i in range(len(c.reads.taps))] if c.norm_of_each_tap else []


def tensor_specs(config: HeadConfig, prefix: str) -> list[TensorSpec]:
    """Every tensor of the checkpoint of such a head, in about the order in which it is read."""
    if isinstance(config, DFlashConfig):
        return _dflash_specs(config, prefix)
    hidden, reads, norms = config.layer.hidden, config.reads, fc_norms(config)
    specs = [
        _numbers("fc.weight", hidden, reads.width),
        *(_numbers(name, reads.width // len(norms)) for name in norms),
        _numbers(prefix.format(0) + "hidden_norm.weight", hidden),
        *_layer_specs(config.layer, prefix.format(0), 2 * hidden),
        _numbers("norm.weight", hidden),
    ]
    if config.own_lm_head:
        specs.append(_numbers(LM_HEAD, config.draft_vocab_size, hidden))
    if config.own_embedding:
        specs.append(_numbers(EMBED, reads.vocab_size, hidden))
    if config.maps_vocabulary:
        specs.append(TensorSpec(D2T, (config.draft_vocab_size,), ("I64", "I32")))
    return specs


def _dflash_specs(c: DFlashConfig, prefix: str) -> list[TensorSpec]:
    hidden = c.layer.hidden
    layers = [_layer_specs(c.layer, prefix.format(layer), hidden) for layer in range(c.num_layers)]
    return [
        _numbers("fc.weight", hidden, c.reads.width),
        _numbers("hidden_norm.weight", hidden),
        _numbers("norm.weight", hidden),
        *(spec for layer in layers for spec in layer),
    ]


def _layer_specs(c: LayerShape, prefix: str, columns: int) -> list[TensorSpec]:
    heads = {"q": c.num_heads, "k": c.num_kv_heads, "v": c.num_kv_heads}
    shapes: dict[str, tuple[int, ...]] = {}
    for part, count in heads.items():
        shapes[f"self_attn.{part}_proj.weight"] = (count * c.head_dim, columns)
        if c.attention_bias:
            shapes[f"self_attn.{part}_proj.bias"] = (count * c.head_dim,)
    if c.head_norms:
        shapes |= {f"self_attn.{part}_norm.weight": (c.head_dim,) for part in "qk"}
    shapes["self_attn.o_proj.weight"] = (c.hidden, c.num_heads * c.head_dim)
    if c.attention_bias:
        shapes["self_attn.o_proj.bias"] = (c.hidden,)
    shapes["post_attention_layernorm.weight"] = (c.hidden,)
    shapes |= {f"mlp.{part}_proj.weight": (c.intermediate, c.hidden) for part in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (c.hidden, c.intermediate)
    shapes["input_layernorm.weight"] = (c.hidden,)
    return [_numbers(prefix + name, *shape) for name, shape in shapes.items()]


def _numbers(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, _NUMBERS)
