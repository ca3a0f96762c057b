"""Reads config.json in the three forms in which gpt-oss is published, and refuses what would be computed wrongly.

* as published on the hub: ``rope_theta`` next to ``rope_scaling``;
* as transformers 5 saves it: ``rope_parameters`` with the theta inside, defaults left out;
* as OpenAI ships it in ``original/``: other names, no ``model_type``, YaRN's constants at top level.

Overrides (``--hf-overrides``) change the file's own keys before anything is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from microscale.errors import Unsupported
from microscale.models.config import (
    apply_overrides,
    build,
    producible,
    read_config_file,
    read_end_tokens,
    read_layer_kinds,
    read_num_layers,
)
from microscale.models.gpt_oss.config import GptOssConfig, alternating
from microscale.models.json_object import JsonObject
from microscale.models.rope import YarnRope, find_rope, read_yarn, rope_keys, to_json

MODEL_TYPE = "gpt_oss"

# <|return|>, <|call|>, <|endoftext|>: the original layout has no key for them.
ORIGINAL_END_TOKENS = (200002, 200012, 199999)
ORIGINAL_RMS_EPSILON = 1e-5

_HUGGING_FACE_KEYS = frozenset({
    "attention_bias", "eos_token_id", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
    "max_position_embeddings", "num_attention_heads", "num_experts_per_tok", "num_hidden_layers",
    "num_key_value_heads", "num_local_experts", "rms_norm_eps", "sliding_window", "swiglu_alpha", "swiglu_limit",
    "tie_word_embeddings", "vocab_size",
})  # fmt: skip
_ORIGINAL_KEYS = frozenset({
    "num_hidden_layers", "num_experts", "experts_per_token", "vocab_size", "hidden_size", "intermediate_size",
    "swiglu_limit", "head_dim", "num_attention_heads", "num_key_value_heads", "sliding_window",
    "initial_context_length", "rope_theta", "rope_scaling_factor", "rope_ntk_alpha", "rope_ntk_beta",
})  # fmt: skip


class CheckpointLayout(StrEnum):
    """Who chose the names of the tensors."""

    HUGGING_FACE = "hugging face"
    ORIGINAL = "original"


@dataclass(frozen=True)
class GptOssFile:
    """A config and the layout of the checkpoint that it came with."""

    config: GptOssConfig
    layout: CheckpointLayout


def read_config(folder: Path, overrides: Mapping[str, object] | None = None) -> GptOssFile:
    """The config in ``folder``, with ``overrides`` applied to its keys."""
    file = read_config_file(folder)
    if "model_type" not in file.data and "experts_per_token" in file.data:
        file = apply_overrides(file, overrides or {}, _ORIGINAL_KEYS)
        return GptOssFile(_from_original(file), CheckpointLayout.ORIGINAL)
    _check_model_type(file)
    file = _override(file, overrides or {})
    return GptOssFile(from_hugging_face(file, folder), CheckpointLayout.HUGGING_FACE)


def _check_model_type(file: JsonObject) -> None:
    """Refuse other architectures and other quantizations by name."""
    model_type = file.require("model_type", str)
    if model_type != MODEL_TYPE:
        raise Unsupported(f"{file.source}: 'model_type' {model_type!r} is not {MODEL_TYPE!r}.")
    if file.data.get("quantization_config") is None:
        raise Unsupported(f"{file.source} has no 'quantization_config'; supported are MXFP4 experts as published.")
    quantization = file.nested("quantization_config")
    method = quantization.require("quant_method", str)
    if method != "mxfp4":
        raise Unsupported(f"{quantization.source}: 'quant_method' {method!r} is not supported; supported is 'mxfp4'.")


def _override(file: JsonObject, overrides: Mapping[str, object]) -> JsonObject:
    """``file`` with overrides of the Hugging Face keys; the rope keys are those that this file uses."""
    return apply_overrides(file, overrides, _HUGGING_FACE_KEYS | rope_keys(file))


def from_hugging_face(file: JsonObject, folder: Path | None = None) -> GptOssConfig:
    """The config that a Hugging Face config.json describes. ``folder`` may have a generation_config.json."""
    _refuse_other_arithmetic(file)
    num_layers = read_num_layers(file)
    vocab_size = file.require("vocab_size", int)
    return build(
        file,
        GptOssConfig,
        num_layers=num_layers,
        hidden=file.require("hidden_size", int),
        intermediate=file.require("intermediate_size", int),
        num_heads=file.require("num_attention_heads", int),
        num_kv_heads=file.require("num_key_value_heads", int),
        head_dim=file.require("head_dim", int),
        num_experts=file.require("num_local_experts", int),
        top_k=file.require("num_experts_per_tok", int),
        vocab_size=vocab_size,
        sliding_window=file.require("sliding_window", int),
        layer_kinds=read_layer_kinds(file, alternating(num_layers)),
        rope=_hugging_face_rope(file),
        rms_epsilon=file.require("rms_norm_eps", float),
        swiglu_limit=file.optional("swiglu_limit", float, 7.0),
        swiglu_alpha=file.optional("swiglu_alpha", float, 1.702),
        max_context=file.require("max_position_embeddings", int),
        eos_token_ids=read_end_tokens(folder, file, vocab_size),
    )


def preset(name: str, config: GptOssConfig, overrides: Mapping[str, object]) -> GptOssConfig:
    """A preset with ``overrides`` of the keys that its config.json would have."""
    return from_hugging_face(_override(JsonObject(f"Preset {name}", to_hugging_face(config)), overrides))


def to_hugging_face(config: GptOssConfig) -> dict[str, object]:
    """The published form of config.json for ``config``: the inverse of ``from_hugging_face``."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "eos_token_id": list(config.eos_token_ids) or None,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "layer_types": [str(kind) for kind in config.layer_kinds],
        "max_position_embeddings": config.max_context,
        "model_type": MODEL_TYPE,
        "num_attention_heads": config.num_heads,
        "num_experts_per_tok": config.top_k,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "num_local_experts": config.num_experts,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": config.rms_epsilon,
        **to_json(config.rope),
        "sliding_window": config.sliding_window,
        "swiglu_alpha": config.swiglu_alpha,
        "swiglu_limit": config.swiglu_limit,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }


def _refuse_other_arithmetic(file: JsonObject) -> None:
    if not file.optional("attention_bias", bool, True):
        raise Unsupported(f"{file.source}: 'attention_bias' false is not supported; gpt-oss has biases.")
    if file.optional("tie_word_embeddings", bool, False):
        raise Unsupported(f"{file.source}: 'tie_word_embeddings' true is not supported; gpt-oss has its own lm_head.")
    activation = file.optional("hidden_act", str, "silu")
    if activation != "silu":
        raise Unsupported(f"{file.source}: 'hidden_act' {activation!r} is not supported; supported is 'silu'.")


def _hugging_face_rope(file: JsonObject) -> YarnRope:
    kind, rope = find_rope(file) or ("", file.nested("rope_scaling"))
    if kind != "yarn":
        raise Unsupported(f"{rope.source}: 'rope_type' {kind!r} is not supported; supported is 'yarn'.")
    return read_yarn(file, rope)


def _from_original(file: JsonObject) -> GptOssConfig:
    num_layers = read_num_layers(file)
    vocab_size = file.require("vocab_size", int)
    factor = file.require("rope_scaling_factor", float)
    context = file.require("initial_context_length", int)
    rope = build(
        file,
        YarnRope,
        theta=file.require("rope_theta", float),
        factor=factor,
        beta_fast=file.require("rope_ntk_beta", float),
        beta_slow=file.require("rope_ntk_alpha", float),
        original_context=context,
        truncate=False,
    )
    return build(
        file,
        GptOssConfig,
        num_layers=num_layers,
        hidden=file.require("hidden_size", int),
        intermediate=file.require("intermediate_size", int),
        num_heads=file.require("num_attention_heads", int),
        num_kv_heads=file.require("num_key_value_heads", int),
        head_dim=file.require("head_dim", int),
        num_experts=file.require("num_experts", int),
        top_k=file.require("experts_per_token", int),
        vocab_size=vocab_size,
        sliding_window=file.require("sliding_window", int),
        layer_kinds=alternating(num_layers),
        rope=rope,
        rms_epsilon=ORIGINAL_RMS_EPSILON,
        # The key came after the first release; the model's own default is 7.
        swiglu_limit=file.optional("swiglu_limit", float, 7.0),
        max_context=int(context * factor),
        eos_token_ids=producible(ORIGINAL_END_TOKENS, vocab_size),
    )
