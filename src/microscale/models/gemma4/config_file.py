"""Reads Gemma 4's config.json, and refuses what would be computed wrongly.

There are two forms: the text model alone (``gemma4_text``), and within the multimodal model (``gemma4``, under
``text_config``). transformers says what full layers have of their own in ``per_layer_config``, published files in
``global_head_dim`` and ``num_global_key_value_heads``. ``models/quantization.py`` reads which layers are quantised.

Overrides (``--hf-overrides``) change the keys of the text model before anything is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from microscale.errors import Unsupported
from microscale.models.config import (
    PAGED,
    LayerKind,
    apply_overrides,
    build,
    read_config_file,
    read_end_tokens,
    read_fields,
    read_layer_kinds,
    read_num_layers,
    refuse_others,
    write_fields,
)
from microscale.models.gemma4.config import AttentionHeads, Gemma4Config, LayerFormats, PartialRope
from microscale.models.json_object import JsonObject
from microscale.models.quantization import Quantisation, read_quantisation

TEXT_MODEL = "gemma4_text"
MULTIMODAL = "gemma4"
MODEL_TYPES = (MULTIMODAL, TEXT_MODEL)

_KEYS = {
    "hidden": "hidden_size",
    "mlp": "intermediate_size",
    "intermediate": "moe_intermediate_size",
    "num_experts": "num_experts",
    "top_k": "top_k_experts",
    "vocab_size": "vocab_size",
    "sliding_window": "sliding_window",
    "rms_epsilon": "rms_norm_eps",
    "max_context": "max_position_embeddings",
}
_OVERRIDABLE = frozenset({
    *_KEYS.values(), "attention_k_eq_v", "eos_token_id", "final_logit_softcapping", "global_head_dim", "head_dim",
    "layer_types", "num_attention_heads", "num_global_key_value_heads", "num_hidden_layers", "num_key_value_heads",
    "per_layer_config", "rope_parameters", "tie_word_embeddings",
})  # fmt: skip
_ONLY = {"attention_bias": False, "hidden_activation": "gelu_pytorch_tanh", "num_kv_shared_layers": 0}
_ROPE_KEYS = frozenset({"rope_type", "rope_theta", "partial_rotary_factor"})
_FULL_KEYS = frozenset({"head_dim", "num_key_value_heads"})

PREFIXES = ("model.language_model.", "language_model.model.", "model.")
"""What may precede a tensor's name: of the multimodal model, today's and an older form, and of the text model alone."""
_MODULES: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    # Experts are one module with many weights; expert 0 represents all.
    "experts": ("experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj"),
}
"""The modules of each field of ``LayerFormats``: they are held as one tensor."""


def read_config(folder: Path, overrides: Mapping[str, object] | None = None) -> Gemma4Config:
    """The config in ``folder``, with ``overrides`` applied to the text model's keys."""
    whole = read_config_file(folder)
    file = whole.nested("text_config") if whole.require("model_type", str) == MULTIMODAL else whole
    # Published files name end tokens and tying next to the text model, not in it.
    outer = {key: whole.data[key] for key in ("eos_token_id", "tie_word_embeddings") if key in whole.data}
    file = apply_overrides(JsonObject(file.source, {**file.data, **outer}), overrides or {}, _OVERRIDABLE)
    quantised = read_quantisation(folder, whole, PREFIXES)
    config = from_text_config(file, _formats(quantised, read_num_layers(file)), folder)
    return replace(config, weights_only=quantised.weights_only)


def preset(name: str, config: Gemma4Config, overrides: Mapping[str, object]) -> Gemma4Config:
    """A preset with ``overrides`` of the keys that its config.json would have. Its formats are those of layer 0."""
    file = apply_overrides(JsonObject(f"Preset {name}", to_text_config(config)), overrides, _OVERRIDABLE)
    return from_text_config(file, config.formats[:1] * read_num_layers(file))


def from_text_config(file: JsonObject, formats: Sequence[LayerFormats], folder: Path | None = None) -> Gemma4Config:
    """The config that a text model's config.json describes. ``folder`` may have a generation_config.json."""
    _refuse_other_arithmetic(file)
    num_layers = read_num_layers(file)
    file.require("layer_types", list)
    kinds = read_layer_kinds(file, ())
    if len(kinds) != num_layers:
        raise file.fault("layer_types", f"names {len(kinds)} layers, not {num_layers}")
    if kinds[-1] is not LayerKind.FULL and not file.overridden:
        # transformers would make it one, whatever the file says.
        raise file.fault("layer_types", f"must end with {LayerKind.FULL}")
    softcap = (
        None if file.data.get("final_logit_softcapping") is None else file.require("final_logit_softcapping", float)
    )
    values = read_fields(file, Gemma4Config, _KEYS)
    return build(
        file,
        Gemma4Config,
        **values,
        layer_kinds=kinds,
        heads={LayerKind.SLIDING: _sliding_heads(file), LayerKind.FULL: _full_heads(file, kinds)},
        rope={kind: _rope(file.nested("rope_parameters").nested(kind.value)) for kind in PAGED},
        softcap=softcap,
        eos_token_ids=read_end_tokens(folder, file, values["vocab_size"]),
        formats=tuple(formats),
        tied=file.optional("tie_word_embeddings", bool, True),
    )


def _formats(quantised: Quantisation, num_layers: int) -> tuple[LayerFormats, ...]:
    """The formats of each layer's weights."""
    for layer_idx in range(num_layers):
        quantised.refuse(layer_idx, "router.proj", "router")
    return tuple(
        LayerFormats(**{part: quantised.format(layer_idx, names) for part, names in _MODULES.items()})
        for layer_idx in range(num_layers)
    )


def to_text_config(config: Gemma4Config) -> dict[str, object]:
    """The published form of the text model's config.json: the inverse of ``from_text_config``."""
    sliding, full = config.heads[LayerKind.SLIDING], config.heads[LayerKind.FULL]
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": TEXT_MODEL,
        **write_fields(config, _KEYS),
        **_ONLY,
        "attention_k_eq_v": full.shared_kv,
        "enable_moe_block": True,
        "eos_token_id": list(config.eos_token_ids) or None,
        "final_logit_softcapping": config.softcap,
        "global_head_dim": full.head_dim,
        "head_dim": sliding.head_dim,
        "hidden_size_per_layer_input": 0,
        "layer_types": [str(kind) for kind in config.layer_kinds],
        "num_attention_heads": sliding.num_heads,
        "num_global_key_value_heads": full.num_kv_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": sliding.num_kv_heads,
        "rope_parameters": {kind.value: _rope_json(rope) for kind, rope in config.rope.items()},
        "tie_word_embeddings": config.tied,
    }


def _rope_json(rope: PartialRope) -> dict[str, object]:
    if rope.fraction == 1:
        return {"rope_theta": rope.theta, "rope_type": "default"}
    return {"partial_rotary_factor": rope.fraction, "rope_theta": rope.theta, "rope_type": "proportional"}


def _refuse_other_arithmetic(file: JsonObject) -> None:
    if not file.require("enable_moe_block", bool):
        raise Unsupported(f"{file.source}: Gemma 4 without experts ('enable_moe_block' false) is not supported.")
    if file.require("hidden_size_per_layer_input", int):
        raise Unsupported(
            f"{file.source}: 'hidden_size_per_layer_input' {file.data['hidden_size_per_layer_input']} is not "
            f"supported; models with an embedding for each layer have no experts."
        )
    refuse_others(file, _ONLY)
    # "vision" changes only how pictures see each other, and only text is taken.
    if file.data.get("use_bidirectional_attention") not in (None, "vision"):
        raise Unsupported(f"{file.source}: 'use_bidirectional_attention' is not supported; text is read forward.")


def _sliding_heads(file: JsonObject) -> AttentionHeads:
    num_heads, num_kv_heads = file.require("num_attention_heads", int), file.require("num_key_value_heads", int)
    return AttentionHeads(num_heads, num_kv_heads, file.require("head_dim", int), shared_kv=False)


def _full_heads(file: JsonObject, kinds: Sequence[LayerKind]) -> AttentionHeads:
    """In full layers heads are wider, and fewer where keys and values are shared."""
    shared = file.require("attention_k_eq_v", bool)
    num_heads, num_kv_heads = file.require("num_attention_heads", int), file.require("num_key_value_heads", int)
    if file.data.get("per_layer_config") is None:
        if shared:
            num_kv_heads = file.require("num_global_key_value_heads", int)
        return AttentionHeads(num_heads, num_kv_heads, file.require("global_head_dim", int), shared)
    layers = file.nested("per_layer_config")
    full = [str(layer_idx) for layer_idx, kind in enumerate(kinds) if kind is LayerKind.FULL]
    beyond = [key for key in layers.data if key not in full and not _is_cut_off(key, len(kinds))]
    if beyond:
        raise Unsupported(f"{layers.source}: layer {beyond[0]!r} is no full layer, and only those may differ.")
    heads = {_own_heads(layers.nested(key), num_kv_heads, file.require("head_dim", int)) for key in full}
    if len(heads) > 1:
        raise Unsupported(f"{layers.source}: full layers that differ among themselves are not supported.")
    own_kv_heads, head_dim = heads.pop() if heads else (num_kv_heads, file.require("head_dim", int))
    return AttentionHeads(num_heads, own_kv_heads, head_dim, shared)


def _is_cut_off(key: str, num_layers: int) -> bool:
    """Whether it is a layer that an override of ``num_hidden_layers`` has left out."""
    return key.isdecimal() and int(key) >= num_layers


def _own_heads(layer: JsonObject, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    for key in layer.data:
        if key not in _FULL_KEYS:
            raise Unsupported(f"{layer.source}: {key!r} is not supported; only {', '.join(sorted(_FULL_KEYS))} are.")
    return layer.optional("num_key_value_heads", int, num_kv_heads), layer.optional("head_dim", int, head_dim)


def _rope(rope: JsonObject) -> PartialRope:
    for key, value in rope.data.items():
        if key not in _ROPE_KEYS and value is not None:
            raise Unsupported(f"{rope.source}: {key!r} is not supported; it would change the frequencies.")
    kind = rope.require("rope_type", str)
    fraction = rope.optional("partial_rotary_factor", float, 1.0)
    if kind not in ("default", "proportional") or (kind == "default" and fraction != 1):
        raise Unsupported(
            f"{rope.source}: 'rope_type' {kind!r} that turns {fraction:g} of a head is not supported; supported are "
            f"'default', which turns all of it, and 'proportional'."
        )
    return PartialRope(rope.require("rope_theta", float), fraction)
