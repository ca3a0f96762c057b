"""The config of a Qwen3-MoE model, and the two forms of config.json in which it is published.

* as published on the hub: ``num_experts``, and ``rope_theta`` next to ``rope_scaling``;
* as transformers 5 saves it: ``num_local_experts``, and ``rope_parameters`` with the theta inside.

Overrides (``--hf-overrides``) change the file's own keys before anything is read. What would be computed wrongly is
refused. ``models/quantization.py`` reads which modules are quantised. The experts of presets are random numbers in
MXFP8: what ``--layer-format experts=mxfp8`` makes of the published BF16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from microscale.errors import BadConfig, Unsupported
from microscale.formats import FORMATS
from microscale.models.config import (
    KEYS,
    LayerKind,
    apply_overrides,
    build,
    read_config_file,
    read_end_tokens,
    read_fields,
    read_layer_kinds,
    refuse_others,
    write_fields,
)
from microscale.models.json_object import JsonObject
from microscale.models.pre_norm import PreNormConfig
from microscale.models.quantization import read_quantisation
from microscale.models.rope import PlainRope, Rope, YarnRope, find_rope, read_plain, read_yarn, rope_keys, to_json

FORMAT_NAMES = ("bf16", "fp8", *FORMATS)
PREFIXES = ("model.",)
"""What may precede the names of layers."""


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(PreNormConfig):
    """The architecture of one Qwen3-MoE model. ``gate_up`` has all gate rows, then all up rows."""

    rope: Rope
    expert_format: str = "bf16"
    """Of the weights in the checkpoint, or of dummy weights; all layers are alike."""
    qkv_format: str = "bf16"
    o_format: str = "bf16"
    lm_head_format: str = "bf16"

    def __post_init__(self) -> None:
        super().__post_init__()
        for fmt in (self.expert_format, self.qkv_format, self.o_format, self.lm_head_format):
            if fmt not in FORMAT_NAMES:
                raise BadConfig(f"weights in {fmt!r} are unknown; known are {', '.join(FORMAT_NAMES)}.")


_30B_A3B = Qwen3MoeConfig(
    num_layers=48,
    layer_kinds=(LayerKind.FULL,) * 48,
    hidden=2048,
    intermediate=768,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    num_experts=128,
    top_k=8,
    vocab_size=151936,
    rope=PlainRope(1e6),
    rms_epsilon=1e-6,
    max_context=40960,
    # <|im_end|>, <|endoftext|>
    eos_token_ids=(151645, 151643),
    expert_format="mxfp8",
)

# 0.9 million parameters. As in the real one: 8 query heads to a KV head, query width above hidden, narrow experts, half
# of them used.
_TINY = Qwen3MoeConfig(
    num_layers=3,
    layer_kinds=(LayerKind.FULL,) * 3,
    hidden=160,
    intermediate=32,
    num_heads=8,
    num_kv_heads=1,
    head_dim=32,
    num_experts=8,
    top_k=4,
    vocab_size=512,
    rope=PlainRope(1e6),
    rms_epsilon=1e-6,
    max_context=8192,
    eos_token_ids=(511,),
    expert_format="mxfp8",
)


def _quantised(fmt: str) -> Qwen3MoeConfig:
    """As published in one format: experts and attention. The router and lm_head are BF16."""
    return replace(_30B_A3B, expert_format=fmt, qkv_format=fmt, o_format=fmt)


PRESETS = {
    "qwen3-30b-a3b": _30B_A3B,
    "qwen3-30b-a3b-nvfp4": _quantised("nvfp4"),
    "qwen3-30b-a3b-mxfp4": _quantised("mxfp4"),
    "qwen3-30b-a3b-fp8": _quantised("fp8_block"),
    "qwen3-moe-tiny": _TINY,
}

# ---- config.json -----------------------------------------------------------------------------------------------------

MODEL_TYPE = "qwen3_moe"

_KEYS = {**KEYS, "intermediate": "moe_intermediate_size", "top_k": "num_experts_per_tok"}
_EXPERTS = ("num_experts", "num_local_experts")
_MODULES = {
    "qkv_format": tuple(f"self_attn.{part}_proj" for part in "qkv"),
    "o_format": ("self_attn.o_proj",),
    # Experts are one module with many weights; expert 0 represents all.
    "expert_format": tuple(f"mlp.experts.0.{part}_proj" for part in ("gate", "up", "down")),
}
"""The modules of each format: they are held as one tensor."""
_ONLY: dict[str, object] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "use_sliding_window": False,
}


def read_config(folder: Path, overrides: Mapping[str, object] | None = None) -> Qwen3MoeConfig:
    """The config in ``folder``, with ``overrides`` applied to its keys."""
    return from_hugging_face(_override(read_config_file(folder), overrides or {}), folder)


def preset(name: str, config: Qwen3MoeConfig, overrides: Mapping[str, object]) -> Qwen3MoeConfig:
    """A preset with ``overrides`` of the keys that its config.json would have."""
    file = _override(JsonObject(f"Preset {name}", to_hugging_face(config)), overrides)
    formats = {field: getattr(config, field) for field in (*_MODULES, "lm_head_format")}
    return replace(from_hugging_face(file), **formats)


def from_hugging_face(file: JsonObject, folder: Path | None = None) -> Qwen3MoeConfig:
    """The config that a config.json describes. ``folder`` may have a generation_config.json."""
    _refuse_other_arithmetic(file)
    keys = _KEYS | {"num_experts": _experts_key(file)}
    values = read_fields(file, Qwen3MoeConfig, {name: key for name, key in keys.items() if name != "head_dim"})
    # Where the key is absent, the format defines it so.
    values["head_dim"] = file.optional("head_dim", int, values["hidden"] // max(values["num_heads"], 1))
    rope = _rope(file)
    if isinstance(rope, YarnRope) and "max_position_embeddings" not in file.overridden:
        # People who add YaRN to a published file leave this key as it is.
        values["max_context"] = int(rope.original_context * rope.factor)
    quantisation = read_quantisation(folder, file, PREFIXES)
    values |= {field: quantisation.uniform(range(values["num_layers"]), names) for field, names in _MODULES.items()}
    values["lm_head_format"] = quantisation.module("lm_head")
    values["weights_only"] = quantisation.weights_only
    return build(
        file,
        Qwen3MoeConfig,
        **values,
        layer_kinds=(LayerKind.FULL,) * values["num_layers"],
        rope=rope,
        eos_token_ids=read_end_tokens(folder, file, values["vocab_size"]),
        tied=file.optional("tie_word_embeddings", bool, False),
    )


def to_hugging_face(config: Qwen3MoeConfig) -> dict[str, object]:
    """The published form of config.json for ``config``: the inverse of ``from_hugging_face``."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": MODEL_TYPE,
        **write_fields(config, _KEYS | {"num_experts": _EXPERTS[0]}),
        **_ONLY,
        **to_json(config.rope),
        "eos_token_id": list(config.eos_token_ids) or None,
        "tie_word_embeddings": config.tied,
    }


def _override(file: JsonObject, overrides: Mapping[str, object]) -> JsonObject:
    known = frozenset({*_KEYS.values(), _experts_key(file), "eos_token_id", "tie_word_embeddings"})
    return apply_overrides(file, overrides, known | rope_keys(file))


def _experts_key(file: JsonObject) -> str:
    present = [key for key in _EXPERTS if file.data.get(key) is not None]
    if len(present) == 2 and file.data[present[0]] != file.data[present[1]]:
        raise BadConfig(f"{file.source} has 'num_experts' and 'num_local_experts', and they differ.")
    return present[0] if present else _EXPERTS[0]


def _refuse_other_arithmetic(file: JsonObject) -> None:
    # transformers' default of norm_topk_prob is false, though every published file says true.
    norm_topk_prob = file.optional("norm_topk_prob", bool, False)
    refuse_others(replace(file, data={**file.data, "norm_topk_prob": norm_topk_prob}), _ONLY)
    if LayerKind.SLIDING in read_layer_kinds(file, ()):
        raise Unsupported(
            f"{file.source}: 'layer_types' with {LayerKind.SLIDING} is not supported; only full layers are."
        )


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
