"""The config of a gpt-oss model, and the three forms of config.json in which it is published.

* as published on the hub: ``rope_theta`` next to ``rope_scaling``;
* as transformers 5 saves it: ``rope_parameters`` with the theta inside, defaults left out;
* as OpenAI ships it in ``original/``: other names, no ``model_type``, YaRN's constants at top level.

Overrides (``--hf-overrides``) change the file's own keys before anything is read. What would be computed wrongly is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from microscale.errors import Unsupported
from microscale.models.config import (
    KEYS,
    LayerKind,
    apply_overrides,
    build,
    check_positive,
    producible,
    read_config_file,
    read_end_tokens,
    read_fields,
    read_layer_kinds,
    refuse_others,
    write_fields,
)
from microscale.models.json_object import JsonObject
from microscale.models.known_checkpoints import refuse_format
from microscale.models.pre_norm import PreNormConfig
from microscale.models.rope import YarnRope, find_rope, read_yarn, rope_keys, to_json


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(PreNormConfig):
    """The architecture of one gpt-oss model. In ``gate_up``, gate rows are even and up rows odd."""

    rope: YarnRope
    swiglu_limit: float
    swiglu_alpha: float = 1.702
    expert_format: str = "mxfp4"
    """``bf16`` in checkpoints of fine-tunes that were not quantised again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "swiglu_limit", "swiglu_alpha")


def alternating(num_layers: int) -> tuple[LayerKind, ...]:
    """gpt-oss's own order: layer 0 slides, layer 1 sees everything, and so on."""
    return tuple(LayerKind.FULL if i % 2 else LayerKind.SLIDING for i in range(num_layers))


def _published(num_layers: int, num_experts: int) -> GptOssConfig:
    return GptOssConfig(
        num_layers=num_layers,
        hidden=2880,
        intermediate=2880,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        num_experts=num_experts,
        top_k=4,
        vocab_size=201088,
        sliding_window=128,
        layer_kinds=alternating(num_layers),
        rope=YarnRope(150000.0, 32.0, beta_fast=32.0, beta_slow=1.0, original_context=4096, truncate=False),
        rms_epsilon=1e-5,
        swiglu_limit=7.0,
        max_context=131072,
        eos_token_ids=(200002, 199999, 200012),
    )


# 3.0 million parameters, 2.4 MB. As in the real ones: 8 query heads to a KV head, query width above hidden, hidden and
# intermediate equal and no multiple of 128, 4 of the experts used, window far shorter than the context.
_TINY = GptOssConfig(
    num_layers=4,
    hidden=160,
    intermediate=160,
    num_heads=8,
    num_kv_heads=1,
    head_dim=32,
    num_experts=8,
    top_k=4,
    vocab_size=512,
    sliding_window=16,
    layer_kinds=alternating(4),
    rope=YarnRope(150000.0, 32.0, beta_fast=32.0, beta_slow=1.0, original_context=256, truncate=False),
    rms_epsilon=1e-5,
    swiglu_limit=7.0,
    max_context=8192,
    eos_token_ids=(511,),
)

PRESETS = {
    "gpt-oss-20b": _published(num_layers=24, num_experts=32),
    "gpt-oss-120b": _published(num_layers=36, num_experts=128),
    "gpt-oss-20b-bf16": replace(_published(num_layers=24, num_experts=32), expert_format="bf16"),
    "gpt-oss-tiny": _TINY,
}

# ---- config.json -----------------------------------------------------------------------------------------------------

MODEL_TYPE = "gpt_oss"
# <|return|>, <|call|>, <|endoftext|>: the original layout has no key for them.
ORIGINAL_END_TOKENS = (200002, 200012, 199999)
ORIGINAL_RMS_EPSILON = 1e-5

_WIDTHS = {"intermediate": "intermediate_size", "sliding_window": "sliding_window"}
_KEYS = {**KEYS, **_WIDTHS, "num_experts": "num_local_experts", "top_k": "num_experts_per_tok"}
_ORIGINAL_KEYS = {
    **{name: KEYS[name] for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "vocab_size")},
    **_WIDTHS,
    "num_experts": "num_experts",
    "top_k": "experts_per_token",
}
_SWIGLU = ("swiglu_alpha", "swiglu_limit")
_ONLY = {"attention_bias": True, "tie_word_embeddings": False, "hidden_act": "silu"}
_OVERRIDABLE = frozenset({*_KEYS.values(), *_SWIGLU, *_ONLY, "eos_token_id", "layer_types"})
_ORIGINAL_OVERRIDABLE = frozenset({
    *_ORIGINAL_KEYS.values(), "swiglu_limit", "initial_context_length", "rope_theta", "rope_scaling_factor",
    "rope_ntk_alpha", "rope_ntk_beta",
})  # fmt: skip


QUANTISATION = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}


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
        file = apply_overrides(file, overrides or {}, _ORIGINAL_OVERRIDABLE)
        return GptOssFile(_from_original(file), CheckpointLayout.ORIGINAL)
    _check_model_type(file)
    file = _override(file, overrides or {})
    return GptOssFile(from_hugging_face(file, folder), CheckpointLayout.HUGGING_FACE)


def _check_model_type(file: JsonObject) -> None:
    """Refuse other architectures by name."""
    model_type = file.require("model_type", str)
    if model_type != MODEL_TYPE:
        raise Unsupported(f"{file.source}: 'model_type' {model_type!r} is not {MODEL_TYPE!r}.")


def _expert_format(file: JsonObject) -> str:
    """MXFP4 as published, or without any quantisation."""
    if file.data.get("quantization_config") is None:
        return "bf16"
    quantization = file.nested("quantization_config")
    method = quantization.require("quant_method", str)
    if method != "mxfp4":
        detail = quantization.data.get("quant_algo") or quantization.data.get("format") or ""
        refuse_format(quantization.source, file.data, method, str(detail), "gpt-oss in MXFP4 and in BF16")
    return method


def _override(file: JsonObject, overrides: Mapping[str, object]) -> JsonObject:
    """``file`` with overrides of the Hugging Face keys; the rope keys are those that this file uses."""
    return apply_overrides(file, overrides, _OVERRIDABLE | rope_keys(file))


def from_hugging_face(file: JsonObject, folder: Path | None = None) -> GptOssConfig:
    """The config that a Hugging Face config.json describes. ``folder`` may have a generation_config.json."""
    refuse_others(file, _ONLY)
    values = read_fields(file, GptOssConfig, _KEYS)
    return build(
        file,
        GptOssConfig,
        **values,
        layer_kinds=read_layer_kinds(file, alternating(values["num_layers"])),
        rope=_hugging_face_rope(file),
        swiglu_limit=file.optional("swiglu_limit", float, 7.0),
        swiglu_alpha=file.optional("swiglu_alpha", float, 1.702),
        expert_format=_expert_format(file),
        eos_token_ids=read_end_tokens(folder, file, values["vocab_size"]),
    )


def preset(name: str, config: GptOssConfig, overrides: Mapping[str, object]) -> GptOssConfig:
    """A preset with ``overrides`` of the keys that its config.json would have."""
    return from_hugging_face(_override(JsonObject(f"Preset {name}", to_hugging_face(config)), overrides))


def to_hugging_face(config: GptOssConfig) -> dict[str, object]:
    """The published form of config.json for ``config``: the inverse of ``from_hugging_face``."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": MODEL_TYPE,
        **write_fields(config, _KEYS),
        **_ONLY,
        **{key: getattr(config, key) for key in _SWIGLU},
        **to_json(config.rope),
        "eos_token_id": list(config.eos_token_ids) or None,
        "layer_types": [str(kind) for kind in config.layer_kinds],
        "quantization_config": QUANTISATION if config.expert_format == "mxfp4" else None,
    }


def _hugging_face_rope(file: JsonObject) -> YarnRope:
    kind, rope = find_rope(file) or ("", file.nested("rope_scaling"))
    if kind != "yarn":
        raise Unsupported(f"{rope.source}: 'rope_type' {kind!r} is not supported; supported is 'yarn'.")
    return read_yarn(file, rope)


def _from_original(file: JsonObject) -> GptOssConfig:
    values = read_fields(file, GptOssConfig, _ORIGINAL_KEYS)
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
        **values,
        layer_kinds=alternating(values["num_layers"]),
        rope=rope,
        rms_epsilon=ORIGINAL_RMS_EPSILON,
        # The key came after the first release; the model's own default is 7.
        swiglu_limit=file.optional("swiglu_limit", float, 7.0),
        max_context=int(context * factor),
        eos_token_ids=producible(ORIGINAL_END_TOKENS, values["vocab_size"]),
    )
