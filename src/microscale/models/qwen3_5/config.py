"""The config of a Qwen3.5-MoE or Qwen3.6 model, and its config.json.

``model_type`` is ``qwen3_5_moe`` with the text model in ``text_config``, as published, or ``qwen3_5_moe_text`` where
the text model was saved alone. Pictures are not computed. Overrides (``--hf-overrides``) change the text model's keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from microscale.errors import BadConfig, Unsupported
from microscale.formats import FORMATS
from microscale.models.config import (
    KEYS,
    LayerKind,
    apply_overrides,
    build,
    check_number,
    read_config_file,
    read_end_tokens,
    read_fields,
    read_layer_kinds,
    read_num_layers,
    refuse_others,
    write_fields,
)
from microscale.models.json_object import JsonObject
from microscale.models.pre_norm import PreNormConfig
from microscale.models.quantization import Quantisation, read_quantisation
from microscale.models.rope import PlainRope
from microscale.parallel.sharding import Shard

FORMAT_NAMES = ("bf16", "fp8", *FORMATS)
PREFIXES = ("model.language_model.", "model.", "language_model.model.")
"""What may precede the names of layers: as published, of a text model alone, of other writers."""
KINDS = (LayerKind.LINEAR, LayerKind.FULL)


@dataclass(frozen=True, kw_only=True)
class LinearHeads:
    """The heads of layers with states."""

    num_key_heads: int
    num_heads: int
    """Value heads: each has a state of ``[key_dim, value_dim]``."""
    key_dim: int
    value_dim: int
    taps: int
    """Tokens that the convolution before them sees."""

    @property
    def channels(self) -> int:
        """Of queries, keys and values together."""
        return 2 * self.num_key_heads * self.key_dim + self.width

    @property
    def width(self) -> int:
        return self.num_heads * self.value_dim


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Of the weights in the checkpoint, or of dummy weights, by what plans call the layers; all layers are alike.

    Shared experts have the format of the others.
    """

    experts: str = "bf16"
    qkv: str = "bf16"
    o: str = "bf16"
    linear_in: str = "bf16"
    linear_out: str = "bf16"
    lm_head: str = "bf16"

    def __post_init__(self) -> None:
        for fmt in (self.experts, self.qkv, self.o, self.linear_in, self.linear_out, self.lm_head):
            if fmt not in FORMAT_NAMES:
                raise BadConfig(f"weights in {fmt!r} are unknown; known are {', '.join(FORMAT_NAMES)}.")


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(PreNormConfig):
    """The architecture of one model.

    ``num_experts`` and ``top_k`` count the shared expert, which is as wide as the others and always among the chosen.
    """

    linear: LinearHeads
    rope: PlainRope
    rotary_dim: int
    """Dimensions of a head that turn; the rest stays."""
    formats: Formats = Formats()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_key_heads", "num_heads", "key_dim", "value_dim", "taps"):
            check_number(f"linear {name}", getattr(self.linear, name))
        if self.linear.num_heads % self.linear.num_key_heads:
            raise BadConfig(
                f"{self.linear.num_heads} value heads cannot share {self.linear.num_key_heads} key heads evenly."
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise BadConfig(f"{self.rotary_dim} of a head's {self.head_dim} dimensions cannot turn in pairs.")
        if self.layer_kinds[-1] is not LayerKind.FULL:
            raise BadConfig(f"the last layer must be {LayerKind.FULL}.")

    def sharded(self, shard: Shard) -> Self:
        if self.linear.num_key_heads % shard.world:
            raise Unsupported(f"{self.linear.num_key_heads} key heads cannot be divided among {shard.world} ranks.")
        heads = replace(
            self.linear,
            num_key_heads=self.linear.num_key_heads // shard.world,
            num_heads=self.linear.num_heads // shard.world,
        )
        return replace(super().sharded(shard), linear=heads)


def _alternating(num_layers: int) -> tuple[LayerKind, ...]:
    """Three layers with states, one with attention, and so on."""
    return tuple(KINDS[layer_idx % 4 == 3] for layer_idx in range(num_layers))


_35B_A3B = Qwen35Config(
    num_layers=40,
    layer_kinds=_alternating(40),
    hidden=2048,
    intermediate=512,
    num_heads=16,
    num_kv_heads=2,
    head_dim=256,
    num_experts=257,
    top_k=9,
    vocab_size=248320,
    rope=PlainRope(1e7),
    rotary_dim=64,
    linear=LinearHeads(num_key_heads=16, num_heads=32, key_dim=128, value_dim=128, taps=4),
    rms_epsilon=1e-6,
    max_context=262144,
    # <|im_end|>, <|endoftext|>
    eos_token_ids=(248046, 248044),
    formats=Formats(experts="mxfp8"),
)

# 0.9 million parameters. As in the real one: three layers with states to one with attention, two value heads to a key
# head, a quarter of a head turns, many narrow experts.
_TINY = Qwen35Config(
    num_layers=4,
    layer_kinds=_alternating(4),
    hidden=128,
    intermediate=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    num_experts=17,
    top_k=5,
    vocab_size=512,
    rope=PlainRope(1e7),
    rotary_dim=8,
    linear=LinearHeads(num_key_heads=2, num_heads=4, key_dim=32, value_dim=32, taps=4),
    rms_epsilon=1e-6,
    max_context=8192,
    eos_token_ids=(511,),
    formats=Formats(experts="mxfp8"),
)

PRESETS = {
    "qwen3.6-35b-a3b": _35B_A3B,
    "qwen3.6-35b-a3b-nvfp4": replace(
        _35B_A3B,
        formats=Formats(experts="nvfp4", qkv="fp8", o="fp8", linear_in="fp8", linear_out="fp8", lm_head="nvfp4"),
        weights_only=True,
    ),
    "qwen3.6-35b-a3b-fp8": replace(
        _35B_A3B,
        formats=Formats(
            experts="fp8_block", qkv="fp8_block", o="fp8_block", linear_in="fp8_block", linear_out="fp8_block"
        ),
    ),
    "qwen3.6-tiny": _TINY,
}

# ---- config.json -----------------------------------------------------------------------------------------------------

MULTIMODAL = "qwen3_5_moe"
TEXT_MODEL = "qwen3_5_moe_text"
MODEL_TYPES = (MULTIMODAL, TEXT_MODEL)

_KEYS = {**KEYS, "intermediate": "moe_intermediate_size"}
_LINEAR_KEYS = {
    "num_key_heads": "linear_num_key_heads",
    "num_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}
_ONLY: dict[str, object] = {
    "attention_bias": False,
    "attn_output_gate": True,
    "hidden_act": "silu",
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_OVERRIDABLE = frozenset({
    *_KEYS.values(), *_LINEAR_KEYS.values(), "num_experts", "num_experts_per_tok", "shared_expert_intermediate_size",
    "layer_types", "rope_parameters", "eos_token_id", "tie_word_embeddings",
})  # fmt: skip
_FULL_MODULES = {"qkv": tuple(f"self_attn.{part}_proj" for part in "qkv"), "o": ("self_attn.o_proj",)}
_LINEAR_MODULES = {
    "linear_in": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "linear_out": ("linear_attn.out_proj",),
}
_MODULES = {
    # Experts are one module with many weights; expert 0 represents all.
    "experts": tuple(
        f"mlp.{module}.{part}_proj" for module in ("experts.0", "shared_expert") for part in ("gate", "up", "down")
    )
}
"""The modules of each format: they are held as one tensor."""
_ROPE_KEYS = frozenset({"rope_type", "rope_theta", "partial_rotary_factor", "mrope_interleaved", "mrope_section"})


def read_config(folder: Path, overrides: Mapping[str, object] | None = None) -> Qwen35Config:
    """The config in ``folder``, with ``overrides`` applied to the text model's keys."""
    whole = read_config_file(folder)
    file = whole.nested("text_config") if whole.require("model_type", str) == MULTIMODAL else whole
    outer = {key: whole.data[key] for key in ("tie_word_embeddings",) if key in whole.data}
    file = apply_overrides(JsonObject(file.source, {**file.data, **outer}), overrides or {}, _OVERRIDABLE)
    config = _from_text_config(file, folder)
    quantised = read_quantisation(folder, whole, PREFIXES)
    return replace(config, formats=_formats(quantised, config.layer_kinds), weights_only=quantised.weights_only)


def preset(name: str, config: Qwen35Config, overrides: Mapping[str, object]) -> Qwen35Config:
    """A preset with ``overrides`` of the keys that its config.json would have."""
    file = apply_overrides(JsonObject(f"Preset {name}", to_text_config(config)), overrides, _OVERRIDABLE)
    return replace(_from_text_config(file), formats=config.formats, weights_only=config.weights_only)


def _from_text_config(file: JsonObject, folder: Path | None = None) -> Qwen35Config:
    """The config that a text model's config.json describes. ``folder`` may have a generation_config.json."""
    refuse_others(file, _ONLY)
    num_layers = read_num_layers(file)
    file.require("layer_types", list)
    kinds = read_layer_kinds(file, (), KINDS)
    if len(kinds) != num_layers:
        raise file.fault("layer_types", f"names {len(kinds)} layers, not {num_layers}")
    values = read_fields(file, Qwen35Config, _KEYS)
    if file.require("shared_expert_intermediate_size", int) != values["intermediate"]:
        raise Unsupported(
            f"{file.source}: a shared expert of another width than the others ('shared_expert_intermediate_size' "
            f"{file.data['shared_expert_intermediate_size']}, 'moe_intermediate_size' {values['intermediate']}) is not "
            f"supported."
        )
    rope = file.nested("rope_parameters")
    return build(
        file,
        Qwen35Config,
        **values,
        layer_kinds=kinds,
        num_experts=file.require("num_experts", int) + 1,
        top_k=file.require("num_experts_per_tok", int) + 1,
        linear=LinearHeads(**read_fields(file, LinearHeads, _LINEAR_KEYS)),
        rope=_rope(rope),
        rotary_dim=int(values["head_dim"] * rope.optional("partial_rotary_factor", float, 1.0)),
        eos_token_ids=read_end_tokens(folder, file, values["vocab_size"]),
        tied=file.optional("tie_word_embeddings", bool, False),
    )


def to_text_config(config: Qwen35Config) -> dict[str, object]:
    """The published form of the text model's config.json: the inverse of reading it."""
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": TEXT_MODEL,
        **write_fields(config, _KEYS),
        **write_fields(config.linear, _LINEAR_KEYS),
        **_ONLY,
        "num_experts": config.num_experts - 1,
        "num_experts_per_tok": config.top_k - 1,
        "shared_expert_intermediate_size": config.intermediate,
        "layer_types": [str(kind) for kind in config.layer_kinds],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope.theta,
            "partial_rotary_factor": config.rotary_dim / config.head_dim,
        },
        "eos_token_id": list(config.eos_token_ids) or None,
        "tie_word_embeddings": config.tied,
    }


def _rope(rope: JsonObject) -> PlainRope:
    """Rows of M-RoPE are for pictures: in text all three are the same position."""
    kind = rope.require("rope_type", str)
    others = [key for key, value in rope.data.items() if key not in _ROPE_KEYS and value is not None]
    if kind != "default" or others:
        what = f"'rope_type' {kind!r}" if kind != "default" else repr(others[0])
        raise Unsupported(f"{rope.source}: {what} is not supported; it would change the frequencies.")
    return build(rope, PlainRope, rope.require("rope_theta", float))


def _formats(quantised: Quantisation, kinds: tuple[LayerKind, ...]) -> Formats:
    for layer_idx in range(len(kinds)):
        quantised.refuse(layer_idx, "mlp.gate", "router")
        quantised.refuse(layer_idx, "mlp.shared_expert_gate", "gate of the shared expert")
    of_kind = {kind: [layer_idx for layer_idx, each in enumerate(kinds) if each is kind] for kind in KINDS}
    for layer_idx in of_kind[LayerKind.LINEAR]:
        for part in "ab":
            quantised.refuse(layer_idx, f"linear_attn.in_proj_{part}", "gates of a layer with states")
    found = {field: quantised.uniform(range(len(kinds)), names) for field, names in _MODULES.items()}
    found |= {field: quantised.uniform(of_kind[LayerKind.FULL], names) for field, names in _FULL_MODULES.items()}
    found |= {field: quantised.uniform(of_kind[LayerKind.LINEAR], names) for field, names in _LINEAR_MODULES.items()}
    return Formats(lm_head=quantised.module("lm_head"), **found)
