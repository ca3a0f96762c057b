"""Opens gpt-oss weights: a checkpoint in the Hugging Face or the original layout, or random ones.

Both layouts hold the same numbers. Experts are MXFP4 ``blocks`` u8 [E, rows, K / 32, 16] with ``scales`` u8
[E, rows, K / 32]; the rest is BF16. Hugging Face keeps q, k and v apart, the original has them in one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from microscale.errors import BadCheckpoint, BadSetting
from microscale.formats import BLOCK, MXFP4, BlockScaled
from microscale.models import hub
from microscale.models.checkpoint import Checkpoint, TensorSpec
from microscale.models.config import GptOssConfig
from microscale.models.config_file import Layout, read_config
from microscale.models.dummy_weights import DummyWeights
from microscale.models.gpt_oss_tensors import GptOssWeights, LayerTensors
from microscale.models.presets import PRESETS, preset


class LoadFormat(StrEnum):
    """Where weights come from."""

    AUTO = "auto"
    SAFETENSORS = "safetensors"
    DUMMY = "dummy"


_BF16 = ("BF16",)
# The published norms are BF16; OpenAI's own model keeps them in float32, and so may what is saved from it.
_NORM = ("BF16", "F32")
_BYTES = ("U8",)


class HuggingFaceWeights:
    """A ``GptOssWeights`` that reads a checkpoint as published on the hub."""

    def __init__(self, config: GptOssConfig, checkpoint: Checkpoint) -> None:
        self.config = config
        self._checkpoint = checkpoint

    @staticmethod
    def specs(c: GptOssConfig) -> list[TensorSpec]:
        """Every tensor of the checkpoint of such a model."""
        specs = [
            TensorSpec("model.embed_tokens.weight", (c.vocab_size, c.hidden), _BF16),
            TensorSpec("model.norm.weight", (c.hidden,), _BF16),
            TensorSpec("lm_head.weight", (c.vocab_size, c.hidden), _BF16),
        ]
        for layer in range(c.num_layers):
            prefix = f"model.layers.{layer}."
            attention, mlp = prefix + "self_attn.", prefix + "mlp."
            for name in ("input_layernorm", "post_attention_layernorm"):
                specs.append(TensorSpec(f"{prefix}{name}.weight", (c.hidden,), _BF16))
            for name, heads in (("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads)):
                specs += _linear(f"{attention}{name}_proj", heads * c.head_dim, c.hidden)
            specs += _linear(attention + "o_proj", c.hidden, c.num_heads * c.head_dim)
            specs.append(TensorSpec(attention + "sinks", (c.num_heads,), _BF16))
            specs += _linear(mlp + "router", c.num_experts, c.hidden)
            specs += _experts(mlp + "experts.gate_up_proj", "_", c.num_experts, 2 * c.intermediate, c.hidden)
            specs += _experts(mlp + "experts.down_proj", "_", c.num_experts, c.hidden, c.intermediate)
        return specs

    def embed(self, device: torch.device | str) -> Tensor:
        return self._checkpoint.read("model.embed_tokens.weight", device)

    def norm(self, device: torch.device | str) -> Tensor:
        return self._checkpoint.read("model.norm.weight", device)

    def lm_head(self, device: torch.device | str) -> Tensor:
        return self._checkpoint.read("lm_head.weight", device)

    def layer(self, layer_idx: int, device: torch.device | str) -> LayerTensors:
        def read(name: str) -> Tensor:
            return self._checkpoint.read(f"model.layers.{layer_idx}.{name}", device)

        def qkv(part: str) -> Tensor:
            return torch.cat([read(f"self_attn.{name}_proj.{part}") for name in "qkv"])

        def experts(name: str) -> BlockScaled:
            return _block_scaled(read(f"mlp.experts.{name}_blocks"), read(f"mlp.experts.{name}_scales"))

        return LayerTensors(
            attn_norm=read("input_layernorm.weight"),
            qkv_weight=qkv("weight"),
            qkv_bias=qkv("bias"),
            sinks=read("self_attn.sinks"),
            o_weight=read("self_attn.o_proj.weight"),
            o_bias=read("self_attn.o_proj.bias"),
            mlp_norm=read("post_attention_layernorm.weight"),
            router_weight=read("mlp.router.weight"),
            router_bias=read("mlp.router.bias"),
            gate_up=experts("gate_up_proj"),
            gate_up_bias=read("mlp.experts.gate_up_proj_bias"),
            down=experts("down_proj"),
            down_bias=read("mlp.experts.down_proj_bias"),
        )


class OriginalWeights:
    """A ``GptOssWeights`` that reads the layout of OpenAI's own code (the folder ``original/`` on the hub)."""

    def __init__(self, config: GptOssConfig, checkpoint: Checkpoint) -> None:
        self.config = config
        self._checkpoint = checkpoint

    @staticmethod
    def specs(c: GptOssConfig) -> list[TensorSpec]:
        """Every tensor of the checkpoint of such a model."""
        specs = [
            TensorSpec("embedding.weight", (c.vocab_size, c.hidden), _BF16),
            TensorSpec("norm.scale", (c.hidden,), _NORM),
            TensorSpec("unembedding.weight", (c.vocab_size, c.hidden), _BF16),
        ]
        for layer in range(c.num_layers):
            attention, mlp = f"block.{layer}.attn.", f"block.{layer}.mlp."
            specs.append(TensorSpec(attention + "norm.scale", (c.hidden,), _NORM))
            specs += _linear(attention + "qkv", c.qkv_rows, c.hidden)
            specs.append(TensorSpec(attention + "sinks", (c.num_heads,), _BF16))
            specs += _linear(attention + "out", c.hidden, c.num_heads * c.head_dim)
            specs.append(TensorSpec(mlp + "norm.scale", (c.hidden,), _NORM))
            specs += _linear(mlp + "gate", c.num_experts, c.hidden)
            specs += _experts(mlp + "mlp1", "_weight.", c.num_experts, 2 * c.intermediate, c.hidden)
            specs += _experts(mlp + "mlp2", "_weight.", c.num_experts, c.hidden, c.intermediate)
        return specs

    def embed(self, device: torch.device | str) -> Tensor:
        return self._checkpoint.read("embedding.weight", device)

    def norm(self, device: torch.device | str) -> Tensor:
        return self._checkpoint.read("norm.scale", device)

    def lm_head(self, device: torch.device | str) -> Tensor:
        return self._checkpoint.read("unembedding.weight", device)

    def layer(self, layer_idx: int, device: torch.device | str) -> LayerTensors:
        def read(name: str) -> Tensor:
            return self._checkpoint.read(f"block.{layer_idx}.{name}", device)

        def experts(name: str) -> BlockScaled:
            return _block_scaled(read(f"mlp.{name}_weight.blocks"), read(f"mlp.{name}_weight.scales"))

        return LayerTensors(
            attn_norm=read("attn.norm.scale"),
            qkv_weight=read("attn.qkv.weight"),
            qkv_bias=read("attn.qkv.bias"),
            sinks=read("attn.sinks"),
            o_weight=read("attn.out.weight"),
            o_bias=read("attn.out.bias"),
            mlp_norm=read("mlp.norm.scale"),
            router_weight=read("mlp.gate.weight"),
            router_bias=read("mlp.gate.bias"),
            gate_up=experts("mlp1"),
            gate_up_bias=read("mlp.mlp1_bias"),
            down=experts("mlp2"),
            down_bias=read("mlp.mlp2_bias"),
        )


_READERS: dict[Layout, type[HuggingFaceWeights] | type[OriginalWeights]] = {
    Layout.HUGGING_FACE: HuggingFaceWeights,
    Layout.ORIGINAL: OriginalWeights,
}


def open_weights(
    model: str,
    *,
    load_format: LoadFormat | str = LoadFormat.AUTO,
    overrides: Mapping[str, object] | None = None,
    offline: bool = False,
    seed: int = 0,
) -> GptOssWeights:
    """The weights of ``model``: a folder, a hub id, or with ``dummy`` the name of a preset.

    A checkpoint is checked against its own config in full before this returns. Overrides may then leave layers out or
    change constants, but not the shape of a tensor.
    """
    overrides = overrides or {}
    if load_format not in list(LoadFormat):
        raise BadSetting(f"Unknown load format {load_format!r}; known are {', '.join(LoadFormat)}.")
    # A folder comes first, so that one that is called like a preset can be opened.
    if model in PRESETS and not Path(model).is_dir():
        if load_format != LoadFormat.DUMMY:
            raise BadCheckpoint(
                f"{model} is a preset without weights: add --load-format dummy, or give a folder or a hub id such as "
                f"openai/gpt-oss-20b."
            )
        return DummyWeights(preset(model, overrides), seed)
    folder = hub.resolve(model, offline=offline, config_only=load_format == LoadFormat.DUMMY)
    file = read_config(folder, overrides)
    if load_format == LoadFormat.DUMMY:
        return DummyWeights(file.config, seed)
    reader = _READERS[file.layout]
    checkpoint = Checkpoint(folder)
    whole = reader.specs(read_config(folder).config)
    checkpoint.check(whole)
    known = {spec.name: spec for spec in whole}
    for spec in reader.specs(file.config):
        if known.get(spec.name) != spec:
            raise BadSetting(
                f"The overrides {', '.join(overrides)} ask for tensor {spec.name!r} in shape {list(spec.shape)}, "
                f"which {folder} does not have; such overrides need --load-format dummy."
            )
    return reader(file.config, checkpoint)


def _linear(name: str, rows: int, columns: int) -> list[TensorSpec]:
    return [TensorSpec(f"{name}.weight", (rows, columns), _BF16), TensorSpec(f"{name}.bias", (rows,), _BF16)]


def _experts(name: str, infix: str, num_experts: int, rows: int, k: int) -> list[TensorSpec]:
    return [
        TensorSpec(f"{name}{infix}blocks", (num_experts, rows, k // BLOCK, BLOCK // 2), _BYTES),
        TensorSpec(f"{name}{infix}scales", (num_experts, rows, k // BLOCK), _BYTES),
        TensorSpec(f"{name}_bias", (num_experts, rows), _BF16),
    ]


def _block_scaled(blocks: Tensor, scales: Tensor) -> BlockScaled:
    """A block's 16 bytes follow the block before: dropping the last axis is a view."""
    return BlockScaled(blocks.flatten(-2), scales, MXFP4)


__all__ = [
    "DummyWeights",
    "GptOssWeights",
    "HuggingFaceWeights",
    "LayerTensors",
    "LoadFormat",
    "OriginalWeights",
    "open_weights",
]
