"""Weights of every family: what was written is what is read, damage is named before or when it is read, overrides
change no shape, and dummy weights are stable."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from torch import Tensor

from microscale.engine.config import EngineConfig
from microscale.engine.loading.memory import weight_bytes
from microscale.errors import BadCheckpoint, BadSetting, Unsupported
from microscale.formats import MXFP4, BlockScaled, decode
from microscale.hardware import cpu
from microscale.kernels.op import Activations
from microscale.models.families import PRESETS, build_model, dummy_weights, open_weights
from microscale.models.gemma4.config import LayerFormats
from microscale.models.outline import outline
from microscale.planning import quantise
from microscale.planning.ops import Ops, Preference
from microscale.planning.plan import Setup, make_plan
from microscale.planning.precision import EXACT, make_precision
from support import tiny_checkpoints, tiny_gemma4, tiny_qwen3_5, tiny_qwen3_moe
from support.family_cases import CASES, ONE_OF_EACH
from support.forward import all_logits
from support.live_bytes import LiveBytes
from support.loading import load_model

CPU = torch.device("cpu")
MODEL = "model.safetensors"
TINY_PRESETS = ("gpt-oss-tiny", "gemma-4-tiny", "qwen3-moe-tiny")
FAMILIES = {CASES[name].family: CASES[name] for name in ("gpt_oss-heads_4_2", *ONE_OF_EACH[1:])}
GEMMA4, QWEN3_MOE = tiny_gemma4.CASES["shared_kv"], tiny_qwen3_moe.CASES["as_published"]
MXFP8 = LayerFormats.all("mxfp8")


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / MODEL)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / MODEL, {"format": "pt"})


def change_config(folder: Path, **values: object) -> None:
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | values))


def numbers(weight: Tensor | BlockScaled) -> Tensor:
    return decode(weight) if isinstance(weight, BlockScaled) else weight.float()


def assert_same(ours: Any, theirs: Any) -> None:
    """Two layers' records, bit for bit."""
    for field in dataclasses.fields(ours):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(a, BlockScaled):
            assert a.format == b.format, field.name
            assert torch.equal(a.values, b.values), field.name
            assert torch.equal(a.scales, b.scales), field.name
        elif isinstance(a, Tensor):
            assert a.dtype == b.dtype, field.name
            assert torch.equal(a, b), field.name
        else:
            assert a == b, field.name


# -- what is read

QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")
ATTENTION = {
    "attn_norm": ("input_layernorm.weight",),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "qkv": tuple(f"{name}.weight" for name in QKV),
    "o": ("self_attn.o_proj.weight",),
}
FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt_oss": {
        "attn_norm": ATTENTION["attn_norm"],
        "qkv_weight": ATTENTION["qkv"],
        "qkv_bias": tuple(f"{name}.bias" for name in QKV),
        "sinks": ("self_attn.sinks",),
        "o_weight": ATTENTION["o"],
        "o_bias": ("self_attn.o_proj.bias",),
        "mlp_norm": ("post_attention_layernorm.weight",),
        "router_weight": ("mlp.router.weight",),
        "router_bias": ("mlp.router.bias",),
        "gate_up": ("mlp.experts.gate_up_proj",),
        "gate_up_bias": ("mlp.experts.gate_up_proj_bias",),
        "down": ("mlp.experts.down_proj",),
        "down_bias": ("mlp.experts.down_proj_bias",),
    },
    "gemma4": ATTENTION
    | {
        "attn_out_norm": ("post_attention_layernorm.weight",),
        "mlp_norm": ("pre_feedforward_layernorm.weight",),
        "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "down": ("mlp.down_proj.weight",),
        "mlp_out_norm": ("post_feedforward_layernorm_1.weight",),
        "experts_norm": ("pre_feedforward_layernorm_2.weight",),
        "router_scale": ("router.scale",),
        "router": ("router.proj.weight",),
        "expert_scale": ("router.per_expert_scale",),
        "experts_gate_up": ("experts.gate_up_proj",),
        "experts_down": ("experts.down_proj",),
        "experts_out_norm": ("post_feedforward_layernorm_2.weight",),
        "both_norm": ("post_feedforward_layernorm.weight",),
        "scalar": ("layer_scalar",),
    },
    "qwen3_moe": ATTENTION
    | {
        "mlp_norm": ("post_attention_layernorm.weight",),
        "router": ("mlp.gate.weight",),
        "gate_up": ("mlp.experts.gate_up_proj",),
        "down": ("mlp.experts.down_proj",),
    },
    "qwen3_5": ATTENTION
    | {
        "mlp_norm": ("post_attention_layernorm.weight",),
        "router": ("mlp.gate.weight", "mlp.shared_expert_gate.weight"),
        "gate_up": ("mlp.experts.gate_up_proj",),
        "down": ("mlp.experts.down_proj",),
        "linear_in": ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"),
        "linear_gates": ("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"),
        "conv": ("linear_attn.conv1d.weight",),
        "a_log": ("linear_attn.A_log",),
        "dt_bias": ("linear_attn.dt_bias",),
        "linear_norm": ("linear_attn.norm.weight",),
        "linear_out": ("linear_attn.out_proj.weight",),
    },
}
"""Field of a layer's record → the tensors of ``written`` that are one below the other in it."""


def written(name: str) -> dict[str, Tensor]:
    """The numbers of a case's checkpoint, with the experts of a layer in two tensors, and names from ``layers`` on."""
    family, _, short = name.partition("-")
    if family == "gpt_oss":
        seed = list(tiny_checkpoints.CASES).index(short)
        tensors = tiny_checkpoints.random_tensors(tiny_checkpoints.CASES[short], seed)
        for blocks in [key for key in tensors if key.endswith("_blocks")]:
            stem = blocks.removesuffix("_blocks")
            tensors[stem] = decode(BlockScaled(tensors[blocks].flatten(-2), tensors[f"{stem}_scales"], MXFP4))
    elif family == "gemma4":
        seed = list(tiny_gemma4.CASES).index(short)
        made = tiny_gemma4.random_gemma4(tiny_gemma4.CASES[short], seed)
        tensors = tiny_gemma4.rounded(made, "mxfp8", tiny_gemma4.MATRICES)
    elif family == "qwen3_5":
        seed = list(tiny_qwen3_5.CASES).index(short)
        tensors = tiny_qwen3_5.random_qwen3_5(tiny_qwen3_5.CASES[short], seed)
        for layer in (f"layers.{layer_idx}.mlp." for layer_idx in range(tiny_qwen3_5.CASES[short].num_layers)):
            parts = [tensors[f"{layer}shared_expert.{part}_proj.weight"] for part in ("gate", "up", "down")]
            for name, last in (("gate_up", torch.cat(parts[:2])), ("down", parts[2])):
                routed = tensors[f"{layer}experts.{name}_proj"]
                tensors[f"{layer}experts.{name}_proj"] = torch.cat((routed, last[None]))
    else:
        seed = list(tiny_qwen3_moe.CASES).index(short)
        tensors = tiny_qwen3_moe.random_qwen3_moe(tiny_qwen3_moe.CASES[short], seed)
    return {key.removeprefix("model."): tensor.float() for key, tensor in tensors.items()}


@pytest.mark.parametrize("name", [name for name in CASES if name != "qwen3_moe-mxfp4"])
def test_what_is_read_is_what_was_written(name: str, tmp_path: Path) -> None:
    case, tensors = CASES[name], written(name)
    weights = open_weights(str(case.write(tmp_path)))
    assert weights.config == case.config
    assert torch.equal(numbers(weights.embed("cpu")), tensors["embed_tokens.weight"])
    assert torch.equal(numbers(weights.norm("cpu")), tensors["norm.weight"])
    assert case.config.tied or torch.equal(numbers(weights.lm_head("cpu")), tensors["lm_head.weight"])
    for layer_idx in range(case.config.num_layers):
        layer = weights.layer(layer_idx, "cpu")
        fields = FIELDS[case.family]
        assert {field.name for field in dataclasses.fields(layer)} == set(fields)
        for field, names in fields.items():
            sources = [tensors.get(f"layers.{layer_idx}.{source}") for source in names]
            found = getattr(layer, field)
            if found is None:
                assert sources == [None] * len(sources)
                continue
            wanted = torch.cat([source for source in sources if source is not None])  # where K = V there is no v
            assert torch.equal(torch.tensor([found]) if isinstance(found, float) else numbers(found), wanted), field


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    "name", [name for name, c in tiny_checkpoints.CASES.items() if tiny_checkpoints.has_original_form(c)]
)
def test_both_layouts_of_gpt_oss_are_the_same_model(name: str, shards: int, tmp_path: Path) -> None:
    config = tiny_checkpoints.CASES[name]
    ours = open_weights(str(tiny_checkpoints.write_hf(tmp_path / "hf", config, shards=4 - shards)))
    theirs = open_weights(str(tiny_checkpoints.write_original(tmp_path / "original", config, shards=shards)))
    assert theirs.config == ours.config == config
    for part in ("embed", "norm", "lm_head"):
        assert torch.equal(getattr(ours, part)("cpu"), getattr(theirs, part)("cpu"))
    for layer_idx in range(config.num_layers):
        assert_same(theirs.layer(layer_idx, "cpu"), ours.layer(layer_idx, "cpu"))


def test_norms_may_be_float32_in_the_original_layout(tmp_path: Path) -> None:
    folder = tiny_checkpoints.write_original(tmp_path, tiny_checkpoints.CASES["heads_4_2"])
    change_tensors(folder, lambda t: t.update({n: t[n].float() for n in t if n.endswith("norm.scale")}))
    assert open_weights(str(folder)).layer(0, "cpu").attn_norm.dtype == torch.float32


def test_experts_in_blocks_are_views_of_what_was_read(tmp_path: Path) -> None:
    values = open_weights(str(FAMILIES["gpt_oss"].write(tmp_path))).layer(0, "cpu").down.values
    assert values.is_contiguous()
    assert values.untyped_storage().nbytes() == values.nbytes
    assert values._base is not None


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_every_prefix_of_gemma4_gives_the_same_tensors(
    prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tensors of pictures and sound are not read, which is logged once."""
    others = (
        {"model.vision_tower.x.weight": torch.ones(2), "embed_audio.y": torch.ones(3)} if prefix != "model." else {}
    )
    tensors = tiny_gemma4.to_modelopt(tiny_gemma4.random_gemma4(GEMMA4))
    ignore = tiny_gemma4.routers(GEMMA4, prefix)
    folder = tiny_gemma4.write_gemma4(tmp_path / "a", GEMMA4, tensors, prefix=prefix, ignore=ignore, others=others)
    with caplog.at_level(logging.INFO):
        weights = open_weights(str(folder))
    message = f"{folder}: 2 tensors are not part of the text model and are not read."
    assert [record.message for record in caplog.records] == [message] * bool(others)
    assert_same(weights.layer(2, "cpu"), open_weights(str(FAMILIES["gemma4"].write(tmp_path / "b"))).layer(2, "cpu"))


def test_scales_may_have_their_own_type(tmp_path: Path) -> None:
    """E8M0, as safetensors knows it, or bytes: the same numbers."""
    folder = FAMILIES["gemma4"].write(tmp_path)
    as_bytes = open_weights(str(folder)).layer(0, "cpu")
    change_tensors(
        folder, lambda t: t.update({n: t[n].view(torch.float8_e8m0fnu) for n in t if n.endswith(".weight_scale")})
    )
    assert_same(open_weights(str(folder)).layer(0, "cpu"), as_bytes)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("family", ["gemma4", "qwen3_moe"])
def test_bf16_experts_may_be_two_tensors_or_many(family: str, fused: bool, tmp_path: Path) -> None:
    if family == "gemma4":
        tensors: dict[str, Tensor] = tiny_gemma4.random_gemma4(GEMMA4)
        folder = tiny_gemma4.write_gemma4(tmp_path, GEMMA4, tensors if fused else split_experts(tensors))
        gate_up, down = "layers.1.experts.gate_up_proj", "layers.1.experts.down_proj"
    else:
        tensors = tiny_qwen3_moe.random_qwen3_moe(QWEN3_MOE)
        folder = tiny_qwen3_moe.write_qwen3_moe(tmp_path, QWEN3_MOE, tensors if fused else split_experts(tensors))
        gate_up, down = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"
    assert (gate_up.removeprefix("model.") in "".join(load_file(folder / MODEL))) == fused
    layer = open_weights(str(folder)).layer(1, "cpu")
    experts = (layer.experts_gate_up, layer.experts_down) if family == "gemma4" else (layer.gate_up, layer.down)
    assert torch.equal(experts[0], tensors[gate_up])
    assert torch.equal(experts[1], tensors[down])


def split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A module for each matrix of each expert."""
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if not stem.endswith("experts"):
            apart[name] = tensor
            continue
        names = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
        for expert, matrix in enumerate(tensor):
            parts = zip(names, matrix.chunk(len(names)), strict=True)
            apart |= {f"{stem}.{expert}.{part}.weight": half for part, half in parts}
    return apart


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("name", tiny_qwen3_moe.CASES)
def test_what_transformers_saves_is_read(name: str, original: bool, tmp_path: Path) -> None:
    """Config and tensors as ``save_pretrained`` writes them, in the published layout and in that of its own memory."""
    config, made = tiny_qwen3_moe.CASES[name], tiny_qwen3_moe.random_qwen3_moe(tiny_qwen3_moe.CASES[name])
    model = tiny_qwen3_moe.transformers_qwen3_moe(config, made).to(torch.bfloat16)
    model.save_pretrained(tmp_path, save_original_format=original)
    assert ("model.layers.0.mlp.experts.0.up_proj.weight" in load_file(tmp_path / MODEL)) == original
    weights = open_weights(str(tmp_path))
    assert weights.config == config
    assert torch.equal(weights.layer(0, "cpu").gate_up, made["model.layers.0.mlp.experts.gate_up_proj"])
    assert config.tied or torch.equal(weights.lm_head("cpu"), made["lm_head.weight"])


# -- damage


def removed(tensor: Tensor | None) -> None:
    return None


def poisoned(byte: int) -> Callable[[Tensor], Tensor]:
    def poison(tensor: Tensor) -> Tensor:
        spoilt = tensor.view(torch.uint8).clone()
        spoilt.view(-1)[3] = byte
        return spoilt.view(tensor.dtype)

    return poison


def damage(folder: Path, name: str, change: Callable[[Any], Tensor | None]) -> str:
    def apply(tensors: dict[str, Tensor]) -> None:
        tensor = change(tensors.pop(name, None))
        if tensor is not None:
            tensors[name] = tensor

    change_tensors(folder, apply)
    return str(folder)


SINKS = "model.layers.1.self_attn.sinks"
SCALES = "model.layers.0.mlp.experts.down_proj_scales"


@pytest.mark.parametrize(
    ("family", "name", "change", "message"),
    [
        ("gpt_oss", SINKS, removed, f"lacks tensor '{SINKS}'"),
        ("gpt_oss", SINKS, lambda t: torch.zeros(5).bfloat16(), "has shape [5], but the config asks for [4]"),
        ("gpt_oss", SINKS, lambda t: t.float(), f"tensor '{SINKS}' has type F32, not BF16 or F16"),
        ("gpt_oss", SCALES, lambda t: t.view(torch.int8), f"tensor '{SCALES}' has type I8, not U8"),
        ("gpt_oss", "model.layers.2.self_attn.sinks", lambda t: torch.zeros(4), "2.self_attn.sinks' is no part"),
        ("gpt_oss", "rotary.inv_freq", lambda t: torch.zeros(4), "'rotary.inv_freq' is no part of the model"),
        ("gemma4", "model.embed_tokens.weight", removed, "lacks the embedding table; it would be called"),
        ("gemma4", "model.layers.1.mlp.up_proj.weight_scale", removed, "'model.layers.1.mlp.up_proj.weight_scale'"),
        ("gemma4", "model.layers.2.experts.3.down_proj.weight", lambda t: t[:, :16], "asks for [64, 32]"),
        ("gemma4", "model.layers.0.self_attn.q_proj.weight", lambda t: t.bfloat16(), "has type BF16, not F8_E4M3"),
        ("gemma4", "model.layers.2.self_attn.v_proj.weight", lambda t: torch.ones(64, 64), "v_proj.weight' is no part"),
        ("qwen3_moe", "model.layers.1.mlp.experts.3.up_proj.weight", removed, "lacks tensor 'model.layers.1.mlp."),
        ("qwen3_moe", "model.layers.2.mlp.experts.3.down_proj.weight", lambda t: t[:, :16], "asks for [64, 32]"),
        ("qwen3_moe", "model.layers.0.self_attn.q_proj.weight", lambda t: t.float(), "has type F32, not BF16 or F16"),
        ("qwen3_moe", "model.layers.2.self_attn.q_proj.bias", lambda t: torch.ones(64), "q_proj.bias' is no part"),
        ("qwen3_moe", "model.layers.0.mlp.shared_expert.up_proj.weight", lambda t: torch.ones(64), "is no part"),
    ],
)  # fmt: skip
def test_damage_is_named_before_anything_is_read(
    family: str, name: str, change: Callable[[Any], Tensor | None], message: str, tmp_path: Path
) -> None:
    folder = damage(FAMILIES[family].write(tmp_path), name, change)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BadCheckpoint, match=re.escape(message)) as error:
        open_weights(folder)
    assert folder in str(error.value)
    assert sorted(tmp_path.iterdir()) == before, "nothing is left behind"


@pytest.mark.parametrize(
    ("family", "name", "change", "message"),
    [
        ("gpt_oss", SINKS, lambda t: t * torch.nan, "contains NaN"),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj_scales", poisoned(255), "contains the scale byte 255"),
        ("gemma4", "model.layers.1.experts.2.up_proj.weight", poisoned(0xFF), "contains NaN"),
        ("gemma4", "model.layers.1.self_attn.o_proj.weight_scale", poisoned(255), "contains the scale byte 255"),
        ("qwen3_moe", "model.layers.1.mlp.experts.2.up_proj.weight", lambda t: t * torch.nan, "contains NaN"),
    ],
)
def test_nan_is_refused_when_its_layer_is_read(
    family: str, name: str, change: Callable[[Any], Tensor], message: str, tmp_path: Path
) -> None:
    weights = open_weights(damage(FAMILIES[family].write(tmp_path), name, change))
    weights.layer(0, "cpu")
    with pytest.raises(BadCheckpoint, match=re.escape(f"{MODEL}: tensor '{name}' {message}")):
        weights.layer(1, "cpu")


def test_a_config_that_does_not_fit_its_tensors(tmp_path: Path) -> None:
    folder = FAMILIES["gpt_oss"].write(tmp_path / "hf")
    change_config(folder, num_local_experts=8)
    with pytest.raises(BadCheckpoint, match=r"router\.weight' has shape \[4, 64\], but the config asks for \[8, 64\]"):
        open_weights(str(folder))
    original = tiny_checkpoints.write_original(tmp_path / "original", tiny_checkpoints.CASES["heads_4_2"])
    (original / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(BadCheckpoint, match=r"lacks tensor 'model\.embed_tokens\.weight'"):
        open_weights(str(original))


# -- overrides


@pytest.mark.parametrize(
    ("family", "key"), [("gpt_oss", "hidden_size"), ("gemma4", "moe_intermediate_size"), ("qwen3_moe", "vocab_size")]
)
def test_overrides_leave_layers_out_and_change_no_shape(family: str, key: str, tmp_path: Path) -> None:
    folder = str(FAMILIES[family].write(tmp_path))
    fewer = open_weights(folder, overrides={"num_hidden_layers": 1, "max_position_embeddings": 77})
    assert (fewer.config.num_layers, fewer.config.max_context) == (1, 77)
    assert_same(fewer.layer(0, "cpu"), open_weights(folder).layer(0, "cpu"))
    with pytest.raises(BadSetting, match=rf"overrides {key} ask for tensor '\S+' in shape .* --load-format dummy"):
        open_weights(folder, overrides={key: 96})
    assert open_weights(folder, overrides={key: 96}, load_format="dummy").config != FAMILIES[family].config
    with pytest.raises(BadSetting, match="Unknown override 'no_such_key'"):
        open_weights(folder, overrides={"no_such_key": 1})


# -- names that are no checkpoint


def test_a_folder_with_a_presets_name_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    FAMILIES["gpt_oss"].write(Path("gpt-oss-tiny"))
    assert open_weights("gpt-oss-tiny").config == FAMILIES["gpt_oss"].config


def test_unknown_names_and_formats(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="gpt-oss-tiny is a preset without a published checkpoint: add --load-f"):
        open_weights("gpt-oss-tiny")
    with pytest.raises(BadCheckpoint, match="'gpt-oss-7b' is neither an existing folder, nor a hub id"):
        open_weights("gpt-oss-7b", load_format="dummy")
    with pytest.raises(BadSetting, match="Unknown load format 'gguf'; known are auto, safetensors, dummy"):
        open_weights("gpt-oss-tiny", load_format="gguf")
    with pytest.raises(BadCheckpoint, match="is empty; a model is a folder"):
        open_weights(str(tmp_path))


# -- dummy weights


def fields(layer: Any) -> dict[str, Tensor | BlockScaled]:
    return {name: value for name, value in vars(layer).items() if isinstance(value, Tensor | BlockScaled)}


WIDE = ("gemma-4-tiny", "router")
"""Drawn wider than other matrices."""


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        *((preset, {}) for preset in TINY_PRESETS),
        ("qwen3-moe-tiny", {"expert_format": "bf16"}),
        ("qwen3-moe-tiny", {"expert_format": "mxfp4"}),
    ],
)
def test_dummy_weights_are_stable(preset: str, changes: dict[str, Any]) -> None:
    """They depend on the seed and the name of a tensor, not on the order of calls."""
    config: Any = replace(PRESETS[preset], **changes)  # type: ignore[type-var]
    one, other, another = dummy_weights(config, 5), dummy_weights(config, 5), dummy_weights(config, 6)
    num_layers = config.num_layers
    forwards = [one.layer(i, "cpu") for i in range(num_layers)]
    backwards = [other.layer(i, "cpu") for i in reversed(range(num_layers))]
    for ours, theirs in zip(forwards, reversed(backwards), strict=True):
        assert_same(ours, theirs)
    assert torch.equal(one.embed("cpu"), other.embed("cpu"))
    first, second, different = fields(forwards[0]), fields(forwards[1]), fields(another.layer(0, "cpu"))
    for name, weight in first.items():
        assert not torch.equal(numbers(weight), numbers(different[name])), name
        if weight.shape == second[name].shape:
            assert not torch.equal(numbers(weight), numbers(second[name])), name
        # Uniform E2M1 codes are 0 in one of eight cases.
        assert numbers(weight).count_nonzero() > 0.8 * numbers(weight).numel(), name
        if len(weight.shape) > 1 and "bias" not in name and (preset, name) != WIDE:
            assert 0.01 < float(numbers(weight).square().mean().sqrt()) < 0.06, name
    assert config.tied or not torch.equal(one.embed("cpu"), one.lm_head("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_have_the_shapes_of_the_checkpoint_and_need_only_its_config(family: str, tmp_path: Path) -> None:
    folder = FAMILIES[family].write(tmp_path)
    real = fields(open_weights(str(folder)).layer(1, "cpu"))
    (folder / MODEL).unlink()
    dummy = fields(open_weights(str(folder), load_format="dummy").layer(1, "cpu"))
    assert {name: weight.shape for name, weight in dummy.items()} == {
        name: weight.shape for name, weight in real.items()
    }
    assert {name: type(weight) for name, weight in dummy.items()} == {
        name: type(weight) for name, weight in real.items()
    }


@pytest.mark.parametrize("preset", TINY_PRESETS)
def test_tiny_presets_are_a_few_megabytes(preset: str) -> None:
    weights = dummy_weights(PRESETS[preset])
    layers = [weights.layer(i, "cpu") for i in range(weights.config.num_layers)]
    assert sum(weight.nbytes for layer in layers for weight in fields(layer).values()) < 8e6


# -- how weights are loaded


@pytest.mark.parametrize("preset", ["gemma-4-tiny", "qwen3-moe-tiny"])
def test_one_tensor_serves_as_embedding_and_lm_head(preset: str) -> None:
    config: Any = PRESETS[preset]
    ops = Ops(cpu(), Activations.BF16, Preference(), EXACT)
    model: Any = build_model(dummy_weights(replace(config, tied=True)), ops, CPU, 16, lambda: None)
    assert model.lm_head._packed.weight.data_ptr() == model.embed._weight.data_ptr()


@pytest.mark.parametrize("family", ["gemma4", "qwen3_moe"])
def test_bf16_experts_are_refused_with_the_remedy(family: str, tmp_path: Path) -> None:
    """No kernel reads BF16 experts: the user chooses a format, or a precision that does."""
    if family == "gemma4":
        folder = tiny_gemma4.write_gemma4(tmp_path, GEMMA4, tiny_gemma4.random_gemma4(GEMMA4))
    else:
        folder = FAMILIES[family].write(tmp_path)
    options = EngineConfig(str(folder), device="cpu")
    with pytest.raises(Unsupported, match=r"not bf16.*--layer-format experts=mxfp8 works"):
        load_model(options)
    for name in ("balanced", "fast"):
        plan = load_model(structs.replace(options, precision=name)).ops.plan
        assert plan.of("moe", "experts")[0].spec.weight_format == "mxfp8"


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
def test_loading_holds_the_quantised_weights_and_one_layer(
    fmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are quantised layer by layer: all of them in BF16 never exist at once."""
    monkeypatch.setattr(quantise, "CHUNK", 1 << 10)
    config = replace(QWEN3_MOE, num_layers=8, layer_kinds=QWEN3_MOE.layer_kinds[:1] * 8, num_experts=8)
    tensors = tiny_qwen3_moe.random_qwen3_moe(config)
    weights = open_weights(str(tiny_qwen3_moe.write_qwen3_moe(tmp_path, config, tensors)))
    precision = make_precision(layer_formats=(f"experts={fmt}",))
    preference = Preference("reference")  # holds weights as they are quantised; its peak is the loader's
    setup = Setup(cpu(), Activations.FLOAT32, preference, precision)
    shape = outline("tiny", config, Activations.FLOAT32, 16, config.max_context)
    held = sum(weight_bytes(shape, make_plan("tiny", shape.uses, setup), setup).values())
    with LiveBytes() as live:
        model = build_model(weights, Ops(cpu(), Activations.FLOAT32, preference, precision), CPU, 16, lambda: None)
    layer = sum(weight.nbytes for weight in fields(weights.layer(0, "cpu")).values())
    chunk = 5 * 4 * quantise.CHUNK
    assert len(model.layers) == 8
    assert live.peak <= held + layer + chunk
    assert held + layer + chunk < 8 * layer, "the bound would notice BF16 experts"


# -- nvidia-modelopt itself


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", tiny_gemma4.CASES)
def test_modelopt_exports_what_the_other_tests_write(name: str, tmp_path: Path) -> None:
    """The real exporter on a CPU: our own writer gives the same names, types and shapes, and both open."""
    quantize = pytest.importorskip("modelopt.torch.quantization", reason="nvidia-modelopt is not installed")
    export = pytest.importorskip("modelopt.torch.export")
    config = tiny_gemma4.CASES[name]
    made = tiny_gemma4.random_gemma4(config)
    model = tiny_gemma4.transformers_gemma4(config, made).to(torch.bfloat16)
    prompt = torch.arange(16)[None]
    model = quantize.quantize(model, quantize.MXFP8_DEFAULT_CFG, lambda m: m(prompt))
    # Without the type the exporter takes the config's, which newer transformers give as a string.
    export.export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=tmp_path / "theirs")
    ours = tiny_gemma4.write_gemma4(
        tmp_path / "ours", config, tiny_gemma4.to_modelopt(made), ignore=tiny_gemma4.routers(config)
    )
    theirs, own = (load_file(folder / "model.safetensors") for folder in (tmp_path / "theirs", ours))
    assert {n: (t.dtype, t.shape) for n, t in theirs.items()} == {n: (t.dtype, t.shape) for n, t in own.items()}
    weights = open_weights(str(tmp_path / "theirs"))
    assert weights.config == replace(config, formats=(MXFP8,) * config.num_layers)
    truth = tiny_gemma4.transformers_gemma4(config, plain(theirs))
    model = load_model(EngineConfig(str(tmp_path / "theirs"), device="cpu", dtype="float32"))
    prompt_ids = list(range(40))
    with torch.inference_mode():
        wanted = truth(torch.tensor([prompt_ids])).logits[0]
    (logits,) = all_logits(model, [prompt_ids], 1000)
    assert float((logits - wanted).abs().max() / (wanted.max() - wanted.min())) <= 2e-4


def plain(theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An exported checkpoint's own numbers in float32, decoded without our formats, experts together again."""
    numbers = {}
    for name, tensor in theirs.items():
        if name.endswith(".weight_scale"):
            continue
        number = tensor.float()
        if f"{name}_scale" in theirs:
            number *= torch.exp2(theirs[f"{name}_scale"].float() - 127).repeat_interleave(32, dim=1)
        numbers[name.removeprefix("model.")] = number
    joined = {name: tensor for name, tensor in numbers.items() if not tiny_gemma4.EXPERTS.match(name)}
    for layer in sorted({name.partition(".experts.")[0] for name in numbers if tiny_gemma4.EXPERTS.match(name)}):
        experts = sorted({int(name.split(".")[3]) for name in numbers if name.startswith(f"{layer}.experts.")})
        gate, up, down = (
            torch.stack([numbers[f"{layer}.experts.{e}.{part}_proj.weight"] for e in experts])
            for part in ("gate", "up", "down")
        )
        joined |= {f"{layer}.experts.gate_up_proj": torch.cat((gate, up), 1), f"{layer}.experts.down_proj": down}
    return joined
