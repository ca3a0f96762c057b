"""The trained model as a checkpoint in the Hugging Face layout, and back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from demo.model import Layer, Model
from microscale.formats import MXFP4, BlockScaled, decode, encode
from microscale.models.gpt_oss.config import to_hugging_face

NUM_SHARDS = 2
"""Two files of 11 MB: each is small enough to be kept anywhere."""
BLOCK_BYTES = 16


def parameters(model: Model) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter under its name in the checkpoint; experts' weights without ``_blocks`` and ``_scales``."""
    yield "model.embed_tokens.weight", model.embed
    for at, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        base = f"model.layers.{at}."
        attention, experts = layer.attention, layer.experts
        yield base + "input_layernorm.weight", layer.attention_norm
        for name in "qkvo":
            yield base + f"self_attn.{name}_proj.weight", getattr(attention, name)
            yield base + f"self_attn.{name}_proj.bias", getattr(attention, f"{name}_bias")
        yield base + "self_attn.sinks", attention.sinks
        yield base + "post_attention_layernorm.weight", layer.experts_norm
        yield base + "mlp.router.weight", experts.router
        yield base + "mlp.router.bias", experts.router_bias
        for name in ("gate_up", "down"):
            yield base + f"mlp.experts.{name}_proj", getattr(experts, name)
            yield base + f"mlp.experts.{name}_proj_bias", getattr(experts, f"{name}_bias")
    yield "model.norm.weight", model.norm
    yield "lm_head.weight", model.lm_head


def _is_mxfp4(name: str) -> bool:
    return name.endswith("_proj")


def tensors(model: Model) -> dict[str, Tensor]:
    """The checkpoint's tensors, on the CPU."""
    made: dict[str, Tensor] = {}
    for name, parameter in parameters(model):
        value = parameter.detach().float().cpu()
        if _is_mxfp4(name):
            coded = encode(value, MXFP4)
            made[f"{name}_blocks"] = coded.values.unflatten(-1, (-1, BLOCK_BYTES))
            made[f"{name}_scales"] = coded.scales
        else:
            made[name] = value.bfloat16()
    return made


def export(model: Model, folder: Path, tokenizer: Path) -> None:
    """Write the checkpoint: two shards, their index, config.json and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    everything = tensors(model)
    total = sum(tensor.nbytes for tensor in everything.values())
    files: dict[str, str] = {}
    shards: list[dict[str, Tensor]] = [{} for _ in range(NUM_SHARDS)]
    done = 0
    for name, tensor in everything.items():
        shard = min(done * NUM_SHARDS // total, NUM_SHARDS - 1)
        shards[shard][name] = tensor.contiguous()
        files[name] = f"model-{shard + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        done += tensor.nbytes
    for shard, held in enumerate(shards):
        path = folder / f"model-{shard + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        save_file(held, path, metadata={"format": "pt"})
        path.chmod(0o644)  # it is made for its owner alone
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": files})
    _write_json(folder / "config.json", {**to_hugging_face(model.config), "pad_token_id": 1, "dtype": "bfloat16"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tokenizer / name).resolve() != (folder / name).resolve():
            shutil.copyfile(tokenizer / name, folder / name)


@torch.no_grad()
def load_exported(model: Model, folder: Path) -> None:
    """The weights of a checkpoint of ``export``. What rounding took stays taken."""
    held: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        held |= load_file(file)
    for name, parameter in parameters(model):
        if _is_mxfp4(name):
            coded = BlockScaled(held[f"{name}_blocks"].flatten(-2), held[f"{name}_scales"], MXFP4)
            parameter.copy_(decode(coded))
        else:
            parameter.copy_(held[name].float())


def _write_json(path: Path, data: dict[str, object]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")
