"""Random gpt-oss checkpoints of a few hundred kB, written to disk in the real layouts.

The numbers are chosen to be unkind: sinks and biases far from zero, windows shorter than a prompt, an original YaRN
context that a prompt soon leaves, and activations that reach the clamp of the gate.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from microscale.formats import MXFP4, BlockScaled, decode, encode
from microscale.models.config import LayerKind
from microscale.models.gpt_oss.config import ORIGINAL_RMS_EPSILON, GptOssConfig, alternating, to_hugging_face
from microscale.models.rope import YarnRope


def tiny_config(
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: tuple[int, int],
    head_dim: int,
    experts: tuple[int, int],
    window: int,
    original_context: int,
    factor: float,
    vocab: int,
) -> GptOssConfig:
    """A config with gpt-oss's own constants: ``heads`` are query and KV heads, ``experts`` all and those used."""
    return GptOssConfig(
        num_layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        num_experts=experts[0],
        top_k=experts[1],
        vocab_size=vocab,
        sliding_window=window,
        layer_kinds=alternating(layers),
        rope=YarnRope(150000.0, factor, 32.0, 1.0, original_context, truncate=False),
        rms_epsilon=ORIGINAL_RMS_EPSILON,
        swiglu_limit=7.0,
        max_context=int(original_context * factor),
        eos_token_ids=(),
    )


def _odd_constants() -> GptOssConfig:
    """Every constant that only the Hugging Face layout can say, and none of them gpt-oss's own."""
    return GptOssConfig(
        num_layers=3,
        hidden=96,
        intermediate=64,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        num_experts=6,
        top_k=3,
        vocab_size=256,
        sliding_window=5,
        layer_kinds=(LayerKind.FULL, LayerKind.FULL, LayerKind.SLIDING),
        rope=YarnRope(10000.0, 4.0, 16.0, 2.0, 64, truncate=True),
        rms_epsilon=1e-3,
        swiglu_limit=2.0,
        swiglu_alpha=1.25,
        max_context=256,
        eos_token_ids=(),
    )


CASES: dict[str, GptOssConfig] = {
    "heads_4_2": tiny_config(
        layers=2, hidden=64, intermediate=32, heads=(4, 2), head_dim=16, experts=(4, 2), window=4,
        original_context=16, factor=16.0, vocab=200,
    ),
    "heads_8_1": tiny_config(
        layers=3, hidden=96, intermediate=64, heads=(8, 1), head_dim=32, experts=(8, 4), window=7,
        original_context=32, factor=8.0, vocab=320,
    ),
    "heads_6_3": tiny_config(
        layers=4, hidden=160, intermediate=96, heads=(6, 3), head_dim=64, experts=(5, 1), window=16,
        original_context=32, factor=16.0, vocab=500,
    ),
    "all_experts": tiny_config(
        layers=3, hidden=64, intermediate=96, heads=(8, 2), head_dim=16, experts=(3, 3), window=5,
        original_context=16, factor=32.0, vocab=256,
    ),
    "odd_constants": _odd_constants(),
}  # fmt: skip


def has_original_form(config: GptOssConfig) -> bool:
    """Whether the original config.json, which has fewer keys, can say all of it."""
    rope = config.rope
    return (
        config.layer_kinds == alternating(config.num_layers)
        and not rope.truncate
        and config.rms_epsilon == ORIGINAL_RMS_EPSILON
        and config.swiglu_alpha == 1.702
        and config.max_context == int(rope.original_context * rope.factor)
    )


def random_tensors(
    config: GptOssConfig, seed: int = 0, *, sink_scale: float = 8.0, bias_scale: float = 1.0
) -> dict[str, Tensor]:
    """Every tensor of a Hugging Face checkpoint. Sinks are uniform in ±``sink_scale``, biases normal."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(torch.bfloat16)

    def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> dict[str, Tensor]:
        return {
            f"{name}.weight": normal(rows, columns, std=gain * columns**-0.5),
            f"{name}.bias": normal(rows, std=bias_scale),
        }

    def experts(name: str, rows: int, columns: int, gain: float) -> dict[str, Tensor]:
        num = config.num_experts
        encoded = encode(normal(num, rows, columns, std=gain * columns**-0.5), MXFP4)
        return {
            f"{name}_blocks": encoded.values.unflatten(-1, (-1, 16)),
            f"{name}_scales": encoded.scales,
            f"{name}_bias": normal(num, rows, std=bias_scale),
        }

    def norm(name: str) -> dict[str, Tensor]:
        return {f"{name}.weight": 1 + normal(config.hidden, std=0.2)}

    hidden, kv_rows = config.hidden, config.num_kv_heads * config.head_dim
    q_rows = config.num_heads * config.head_dim
    tensors = {"model.embed_tokens.weight": normal(config.vocab_size, hidden, std=0.5)}
    for layer in range(config.num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        sinks = (torch.rand(config.num_heads, generator=generator) * 2 - 1) * sink_scale
        tensors |= norm(f"model.layers.{layer}.input_layernorm")
        tensors |= linear(f"{attention}.q_proj", q_rows, hidden)
        tensors |= linear(f"{attention}.k_proj", kv_rows, hidden)
        # A gain of 3 lets the context speak over the last token: with 1, greedy text soon runs in a circle of 3 tokens.
        tensors |= linear(f"{attention}.v_proj", kv_rows, hidden, gain=3.0)
        tensors |= {f"{attention}.sinks": sinks.to(torch.bfloat16)}
        tensors |= linear(f"{attention}.o_proj", hidden, q_rows)
        tensors |= norm(f"model.layers.{layer}.post_attention_layernorm")
        tensors |= linear(f"{mlp}.router", config.num_experts, hidden, gain=2.0)
        # A gain of 2 brings some gates beyond the clamp at 7 and leaves most below it.
        tensors |= experts(f"{mlp}.experts.gate_up_proj", 2 * config.intermediate, hidden, gain=2.0)
        tensors |= experts(f"{mlp}.experts.down_proj", hidden, config.intermediate, gain=1.0)
    tensors |= norm("model.norm")
    return tensors | {"lm_head.weight": normal(config.vocab_size, hidden, std=2 * hidden**-0.5)}


def to_original(tensors: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """The same tensors under the names of OpenAI's own code, q, k and v in one."""
    renamed = {
        "embedding.weight": tensors["model.embed_tokens.weight"],
        "norm.scale": tensors["model.norm.weight"],
        "unembedding.weight": tensors["lm_head.weight"],
    }
    names = {
        "attn.norm.scale": "input_layernorm.weight",
        "attn.sinks": "self_attn.sinks",
        "attn.out.weight": "self_attn.o_proj.weight",
        "attn.out.bias": "self_attn.o_proj.bias",
        "mlp.norm.scale": "post_attention_layernorm.weight",
        "mlp.gate.weight": "mlp.router.weight",
        "mlp.gate.bias": "mlp.router.bias",
        "mlp.mlp1_weight.blocks": "mlp.experts.gate_up_proj_blocks",
        "mlp.mlp1_weight.scales": "mlp.experts.gate_up_proj_scales",
        "mlp.mlp1_bias": "mlp.experts.gate_up_proj_bias",
        "mlp.mlp2_weight.blocks": "mlp.experts.down_proj_blocks",
        "mlp.mlp2_weight.scales": "mlp.experts.down_proj_scales",
        "mlp.mlp2_bias": "mlp.experts.down_proj_bias",
    }
    for layer in range(num_layers):
        old = f"model.layers.{layer}."
        renamed |= {f"block.{layer}.{name}": tensors[old + theirs] for name, theirs in names.items()}
        for part in ("weight", "bias"):
            qkv = [tensors[f"{old}self_attn.{name}_proj.{part}"] for name in "qkv"]
            renamed[f"block.{layer}.attn.qkv.{part}"] = torch.cat(qkv)
    return renamed


def original_json(config: GptOssConfig) -> dict[str, object]:
    """The config.json of ``original/``."""
    if not has_original_form(config):
        raise ValueError("the original config.json cannot say this")
    return {
        "num_hidden_layers": config.num_layers,
        "num_experts": config.num_experts,
        "experts_per_token": config.top_k,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "swiglu_limit": config.swiglu_limit,
        "head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "sliding_window": config.sliding_window,
        "initial_context_length": config.rope.original_context,
        "rope_theta": config.rope.theta,
        "rope_scaling_factor": config.rope.factor,
        "rope_ntk_alpha": config.rope.beta_slow,
        "rope_ntk_beta": config.rope.beta_fast,
    }


def write_hf(
    folder: Path,
    config: GptOssConfig,
    seed: int = 0,
    shards: int = 1,
    *,
    sink_scale: float = 8.0,
    bias_scale: float = 1.0,
) -> Path:
    """A checkpoint as published on the hub, with an index if there is more than one shard. Gives ``folder``."""
    tensors = random_tensors(config, seed, sink_scale=sink_scale, bias_scale=bias_scale)
    files = _write_shards(folder, tensors, shards, "model-{:05d}-of-{:05d}.safetensors")
    _write_json(folder / "config.json", to_hugging_face(config))
    if shards > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": files})
    return folder


def write_plain(folder: Path, config: GptOssConfig, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
    """The checkpoint of ``write_hf`` as a fine-tune that was not quantised again: experts ``[E, K, rows]``, the other
    way round."""
    tensors = random_tensors(config, seed)
    for blocks in [name for name in tensors if name.endswith("_blocks")]:
        name = blocks.removesuffix("_blocks")
        coded = BlockScaled(tensors.pop(blocks).flatten(-2), tensors.pop(f"{name}_scales"), MXFP4)
        tensors[name] = decode(coded).transpose(1, 2)
    _write_shards(folder, {name: tensor.to(dtype) for name, tensor in tensors.items()}, 1, "")
    _write_json(folder / "config.json", to_hugging_face(replace(config, expert_format="bf16")))
    return folder


def write_original(
    folder: Path,
    config: GptOssConfig,
    seed: int = 0,
    shards: int = 1,
    *,
    sink_scale: float = 8.0,
    bias_scale: float = 1.0,
) -> Path:
    """The checkpoint of ``write_hf`` with the same seed in the layout of ``original/``: no index. Gives ``folder``."""
    tensors = random_tensors(config, seed, sink_scale=sink_scale, bias_scale=bias_scale)
    renamed = to_original(tensors, config.num_layers)
    _write_shards(folder, renamed, shards, "model--{:05d}-of-{:05d}.safetensors")
    _write_json(folder / "config.json", original_json(config))
    return folder


def _write_shards(folder: Path, tensors: dict[str, Tensor], shards: int, pattern: str) -> dict[str, str]:
    """The file of every tensor. Neighbours go to different shards, so that no layer is in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    files: dict[str, str] = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else pattern.format(shard + 1, shards)
        mine = {name: tensors[name].contiguous() for name in names[shard::shards]}
        save_file(mine, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(mine, file)
    return files


def _write_json(path: Path, data: dict[str, object]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")
