"""Reads Qwen3-MoE's config.json, and refuses what would be computed wrongly.

There are two forms: as published (``num_experts``, ``rope_theta`` next to ``rope_scaling``), and as transformers 5
saves it (``num_local_experts``, ``rope_parameters`` with the theta inside).

Overrides (``--hf-overrides``) change the file's own keys before anything is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from microscale.errors import BadConfig, Unsupported
from microscale.models.config import (
    LayerKind,
    apply_overrides,
    build,
    read_config_file,
    read_end_tokens,
    read_layer_kinds,
    read_num_layers,
)
from microscale.models.json_object import JsonObject
from microscale.models.qwen3_moe.config import Qwen3MoeConfig
from microscale.models.rope import Rope, YarnRope, find_rope, read_plain, read_yarn, rope_keys, to_json

MODEL_TYPE = "qwen3_moe"

_KEYS = frozenset({
    "eos_token_id", "head_dim", "hidden_size", "max_position_embeddings", "moe_intermediate_size",
    "num_attention_heads", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps",
    "tie_word_embeddings", "vocab_size",
})  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts")
_QUANTISE = "supported are BF16 checkpoints, whose experts --layer-format experts=mxfp8 or mxfp4 quantises as they load"


def read_config(folder: Path, overrides: Mapping[str, object] | None = None) -> Qwen3MoeConfig:
    """The config in ``folder``, with ``overrides`` applied to its keys."""
    return from_hugging_face(_override(read_config_file(folder), overrides or {}), folder)


def preset(name: str, config: Qwen3MoeConfig, overrides: Mapping[str, object]) -> Qwen3MoeConfig:
    """A preset with ``overrides`` of the keys that its config.json would have."""
    file = _override(JsonObject(f"Preset {name}", to_hugging_face(config)), overrides)
    return replace(from_hugging_face(file), expert_format=config.expert_format)


def from_hugging_face(file: JsonObject, folder: Path | None = None) -> Qwen3MoeConfig:
    """The config that a config.json describes. ``folder`` may have a generation_config.json."""
    _refuse_other_arithmetic(file)
    hidden, num_heads = file.require("hidden_size", int), file.require("num_attention_heads", int)
    vocab_size = file.require("vocab_size", int)
    rope = _rope(file)
    return build(
        file,
        Qwen3MoeConfig,
        num_layers=read_num_layers(file),
        hidden=hidden,
        intermediate=file.require("moe_intermediate_size", int),
        num_heads=num_heads,
        num_kv_heads=file.require("num_key_value_heads", int),
        # Where the key is absent, the format defines it so.
        head_dim=file.optional("head_dim", int, hidden // max(num_heads, 1)),
        num_experts=file.require(_experts_key(file), int),
        top_k=file.require("num_experts_per_tok", int),
        vocab_size=vocab_size,
        rope=rope,
        rms_epsilon=file.require("rms_norm_eps", float),
        max_context=_context(file, rope),
        eos_token_ids=read_end_tokens(folder, file, vocab_size),
        tied=file.optional("tie_word_embeddings", bool, False),
    )


def to_hugging_face(config: Qwen3MoeConfig) -> dict[str, object]:
    """The published form of config.json for ``config``: the inverse of ``from_hugging_face``."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "eos_token_id": list(config.eos_token_ids) or None,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "max_position_embeddings": config.max_context,
        "mlp_only_layers": [],
        "model_type": MODEL_TYPE,
        "moe_intermediate_size": config.intermediate,
        "norm_topk_prob": True,
        "num_attention_heads": config.num_heads,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_epsilon,
        **to_json(config.rope),
        "tie_word_embeddings": config.tied,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def _override(file: JsonObject, overrides: Mapping[str, object]) -> JsonObject:
    return apply_overrides(file, overrides, _KEYS | {_experts_key(file)} | rope_keys(file))


def _experts_key(file: JsonObject) -> str:
    present = [key for key in _EXPERTS if file.data.get(key) is not None]
    if len(present) == 2 and file.data[present[0]] != file.data[present[1]]:
        raise BadConfig(f"{file.source} has 'num_experts' and 'num_local_experts', and they differ.")
    return present[0] if present else _EXPERTS[0]


def _refuse_other_arithmetic(file: JsonObject) -> None:
    source = file.source
    if file.data.get("quantization_config") is not None:
        method = file.nested("quantization_config").data.get("quant_method")
        raise Unsupported(
            f"{source}: 'quantization_config' with 'quant_method' {method!r} is not supported; {_QUANTISE}."
        )
    if file.optional("attention_bias", bool, False):
        raise Unsupported(f"{source}: 'attention_bias' true is not supported; Qwen3-MoE has no biases.")
    # transformers' default is false, though every published file says true.
    if not file.optional("norm_topk_prob", bool, False):
        raise Unsupported(
            f"{source}: 'norm_topk_prob' false is not supported; the chosen experts' weights add up to 1."
        )
    activation = file.optional("hidden_act", str, "silu")
    if activation != "silu":
        raise Unsupported(f"{source}: 'hidden_act' {activation!r} is not supported; supported is 'silu'.")
    if file.optional("use_sliding_window", bool, False):
        raise Unsupported(f"{source}: 'use_sliding_window' true is not supported; every layer sees everything.")
    if LayerKind.SLIDING in read_layer_kinds(file, ()):
        raise Unsupported(f"{source}: 'layer_types' with {LayerKind.SLIDING} is not supported; only full layers are.")
    if file.optional("mlp_only_layers", list, []):
        raise Unsupported(f"{source}: 'mlp_only_layers' is not supported; every layer has experts.")
    if file.optional("decoder_sparse_step", int, 1) != 1:
        raise Unsupported(f"{source}: 'decoder_sparse_step' must be 1; every layer has experts.")


def _rope(file: JsonObject) -> Rope:
    kind_and_rope = find_rope(file)
    if kind_and_rope is None:
        return read_plain(file, None)
    kind, rope = kind_and_rope
    if kind == "yarn":
        return read_yarn(file, rope)
    if kind == "default":
        return read_plain(file, rope)
    raise Unsupported(f"{rope.source}: 'rope_type' {kind!r} is not supported; supported are 'default' and 'yarn'.")


def _context(file: JsonObject, rope: Rope) -> int:
    """With YaRN the stretched context: people who add it to a published file leave ``max_position_embeddings``."""
    written = file.require("max_position_embeddings", int)
    if isinstance(rope, YarnRope) and "max_position_embeddings" not in file.overridden:
        return int(rope.original_context * rope.factor)
    return written
