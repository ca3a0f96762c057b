"""Gemma 4 checkpoints: both prefixes and both ways to say what full layers have, damage and strangers named, exclusions
honoured, pictures left out, dummies stable."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4TextConfig

from microscale.backends.ops import Ops, Preference
from microscale.backends.precision import EXACT
from microscale.engine.loading.options import LoadOptions
from microscale.errors import BadCheckpoint, BadConfig, BadSetting, Unsupported
from microscale.formats import BlockScaled, decode
from microscale.hardware import cpu
from microscale.kernels.op import Activations
from microscale.models.families import PRESETS, dummy_weights, open_weights, preset, read_model_config
from microscale.models.gemma4.config import Gemma4Config, LayerFormats
from microscale.models.gemma4.config_file import to_text_config
from microscale.models.gemma4.model import Gemma4
from microscale.models.tensor_table import Weight
from microscale.models.weights import CheckpointWeights as Gemma4Checkpoint
from support.families import gemma4_preset, gemma4_weights
from support.forward import all_logits
from support.loading import load_model
from support.tiny_gemma4 import (
    CASES,
    EXPERTS,
    MATRICES,
    random_gemma4,
    rounded,
    routers,
    to_modelopt,
    transformers_gemma4,
    write_gemma4,
)

TINY = CASES["shared_kv"]
MXFP8 = LayerFormats.all("mxfp8")


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return random_gemma4(TINY, seed=3)


@pytest.fixture
def folder(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    return write_gemma4(tmp_path, TINY, to_modelopt(tensors), ignore=routers(TINY))


def change(folder: Path, **values: object) -> None:
    """Replace keys of config.json; ``...`` takes one away."""
    path = folder / "config.json"
    data = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))


# ---- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_every_prefix_gives_the_same_tensors(
    prefix: str, tmp_path: Path, tensors: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """And what sees and hears is left out, which is said once."""
    others = (
        {} if prefix == "model." else {"model.vision_tower.x.weight": torch.ones(2), "embed_audio.y": torch.ones(3)}
    )
    path = write_gemma4(
        tmp_path, TINY, to_modelopt(tensors), prefix=prefix, ignore=routers(TINY, prefix), others=others
    )
    with caplog.at_level(logging.INFO):
        weights = open_weights(str(path))
    assert isinstance(weights, Gemma4Checkpoint)
    said = [record.message for record in caplog.records]
    assert ([f"{tmp_path}: 2 tensors are not part of the text model and are not read."] if others else []) == said
    assert weights.config.formats == (MXFP8,) * 3
    truth = rounded(tensors, "mxfp8", MATRICES)
    sliding, full = weights.layer(1, "cpu"), weights.layer(2, "cpu")
    assert isinstance(sliding.qkv, BlockScaled)
    assert isinstance(full.qkv, BlockScaled)
    assert isinstance(full.experts_gate_up, BlockScaled)
    q, k, v = (truth[f"layers.1.self_attn.{part}_proj.weight"] for part in "qkv")
    assert torch.equal(decode(sliding.qkv), torch.cat((q, k, v)))
    q, k = (truth[f"layers.2.self_attn.{part}_proj.weight"] for part in "qk")
    assert torch.equal(decode(full.qkv), torch.cat((q, k)))
    assert torch.equal(decode(full.experts_gate_up), truth["layers.2.experts.gate_up_proj"])
    assert full.scalar == float(tensors["layers.2.layer_scalar"])
    assert torch.equal(weights.embed("cpu"), tensors["embed_tokens.weight"])


def decoded(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, BlockScaled)
    return decode(weight)


def test_scales_may_have_their_own_type(folder: Path) -> None:
    """E8M0, as safetensors knows it, or bytes: the same numbers."""
    path = folder / "model.safetensors"
    bytes_ = gemma4_weights(str(folder)).layer(0, "cpu")
    held = load_file(path)
    save_file({n: t.view(torch.float8_e8m0fnu) if n.endswith(".weight_scale") else t for n, t in held.items()}, path)
    typed = gemma4_weights(str(folder)).layer(0, "cpu")
    assert torch.equal(decoded(typed.experts_down), decoded(bytes_.experts_down))
    assert torch.equal(decoded(typed.o), decoded(bytes_.o))


def test_bf16_experts_may_be_apart_too(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stem, _, kind = name.rpartition(".")
            for e, matrix in enumerate(tensor):
                halves = (
                    [("down_proj", matrix)]
                    if kind == "down_proj"
                    else zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
                )
                apart |= {f"{stem}.{e}.{part}.weight": half for part, half in halves}
        else:
            apart[name] = tensor
    layer = gemma4_weights(str(write_gemma4(tmp_path, TINY, apart))).layer(1, "cpu")
    assert isinstance(layer.experts_gate_up, torch.Tensor)
    assert isinstance(layer.experts_down, torch.Tensor)
    assert torch.equal(layer.experts_gate_up, tensors["layers.1.experts.gate_up_proj"])
    assert torch.equal(layer.experts_down, tensors["layers.1.experts.down_proj"])


def test_transformers_own_config_is_the_same(tmp_path: Path) -> None:
    """transformers writes what full layers have of their own into ``per_layer_config``."""
    for name, config in CASES.items():
        Gemma4TextConfig(**to_text_config(config)).save_pretrained(tmp_path / name)
        assert read_model_config(tmp_path / name) == config


def test_older_exports_say_it_beside_the_config(folder: Path) -> None:
    change(folder, quantization_config=...)
    left_out = {"exclude_modules": routers(TINY), "quant_algo": "MXFP8", "kv_cache_quant_algo": None}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": left_out}))
    assert gemma4_weights(str(folder)).config.formats == (MXFP8,) * 3


def test_end_tokens_stand_beside_the_text_model_or_in_generation_config(folder: Path) -> None:
    change(folder, eos_token_id=[1, 106, 9999])
    assert read_model_config(folder).eos_token_ids == (1, 106)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7]}')
    assert read_model_config(folder).eos_token_ids == (7,)
    assert read_model_config(folder, {"eos_token_id": [8]}).eos_token_ids == (8,)


# ---- what is refused -------------------------------------------------------------------------------------------------


def _poison(tensor: torch.Tensor, byte: int) -> torch.Tensor:
    spoilt = tensor.view(torch.uint8).clone()
    spoilt.view(-1)[3] = byte
    return spoilt.view(tensor.dtype)


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("layers.1.mlp.up_proj.weight_scale", None, "lacks tensor 'model.layers.1.mlp.up_proj.weight_scale'"),
        ("layers.2.experts.3.down_proj.weight", lambda t: t[:, :16], "[64, 16], but the config asks for [64, 32]"),
        ("layers.0.self_attn.q_proj.weight", lambda t: t.float().bfloat16(), "has type BF16, not F8_E4M3"),
        ("layers.2.self_attn.v_proj.weight", lambda t: torch.ones(64, 64), "v_proj.weight' is no part"),
    ],
)  # fmt: skip
def test_damage_is_named_before_anything_is_read(
    folder: Path, name: str, damage: Callable[[torch.Tensor], torch.Tensor] | None, said: str
) -> None:
    path = folder / "model.safetensors"
    held = load_file(path)
    old = held.pop(f"model.{name}", None)
    if damage is not None:
        held[f"model.{name}"] = damage(old).contiguous()
    save_file(held, path)
    with pytest.raises(BadCheckpoint, match=re.escape(said)) as error:
        open_weights(str(folder))
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    ("name", "byte", "said"),
    [
        ("layers.1.experts.2.up_proj.weight", 0xFF, "'model.layers.1.experts.2.up_proj.weight' contains NaN"),
        ("layers.1.self_attn.o_proj.weight_scale", 255, "contains the scale byte 255"),
    ],
)
def test_nan_is_refused_when_it_is_read(folder: Path, name: str, byte: int, said: str) -> None:
    path = folder / "model.safetensors"
    held = load_file(path)
    held[f"model.{name}"] = _poison(held[f"model.{name}"], byte)
    save_file(held, path)
    with pytest.raises(BadCheckpoint, match=re.escape(said)):
        gemma4_weights(str(folder)).layer(1, "cpu")


def quantization(**values: object) -> dict[str, object]:
    return {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": [], **values}}


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        (quantization(quant_method="awq"), Unsupported, "'quant_method' 'awq' is not supported"),
        (quantization(quant_algo="NVFP4"), Unsupported, "'quant_algo' 'NVFP4' is not supported; supported is 'MXFP8'"),
        (quantization(kv_cache_quant_algo="FP8"), Unsupported, "--kv-cache-dtype"),
        (quantization(), Unsupported, "the router of layer 0 is in MXFP8"),
        (quantization(ignore=[3]), BadConfig, "'ignore' must be a list of module names"),
        (
            quantization(ignore=[*routers(TINY), "*.1.self_attn.k_proj"]),
            Unsupported,
            "layer 1 has self_attn.k_proj in BF16 and the rest of",
        ),
        ({"enable_moe_block": False}, Unsupported, "without experts"),
        ({"hidden_size_per_layer_input": 256}, Unsupported, "'hidden_size_per_layer_input' 256 is not supported"),
        ({"num_kv_shared_layers": 2}, Unsupported, "'num_kv_shared_layers' is not supported"),
        ({"attention_bias": True}, Unsupported, "'attention_bias' true"),
        ({"hidden_activation": "silu"}, Unsupported, "'hidden_activation' 'silu'"),
        ({"use_bidirectional_attention": "all"}, Unsupported, "'use_bidirectional_attention'"),
        ({"layer_types": ["sliding_attention"] * 3}, BadConfig, "'layer_types' must end with full_attention"),
        ({"layer_types": ["full_attention"] * 2}, BadConfig, "'layer_types' names 2 layers, not 3"),
        ({"global_head_dim": ...}, BadConfig, "has no key 'global_head_dim'"),
        ({"top_k_experts": ...}, BadConfig, "has no key 'top_k_experts'"),
        ({"num_attention_heads": 3}, BadConfig, "3 heads of sliding layers cannot share 2 KV heads evenly"),
        ({"moe_intermediate_size": 40}, BadConfig, "intermediate size 40 is not a multiple of the 32"),
        ({"per_layer_config": {"0": {"head_dim": 64}}}, Unsupported, "layer '0' is no full layer"),
        ({"per_layer_config": {"2": {"sliding_window": 3}}}, Unsupported, "'sliding_window' is not supported"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e6}}},
            Unsupported,
            "'rope_type' 'yarn'",
        ),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    folder: Path, values: dict[str, object], error: type[Exception], said: str
) -> None:
    if "rope_parameters" in values:
        rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, **values["rope_parameters"]}  # type: ignore[dict-item]
        values = {"rope_parameters": rope}
    change(folder, **values)
    with pytest.raises(error, match=re.escape(said)) as raised:
        open_weights(str(folder))
    assert str(folder) in str(raised.value)


def test_overrides_of_a_checkpoint_change_no_shape(folder: Path) -> None:
    assert open_weights(str(folder), overrides={"num_hidden_layers": 2}).config.num_layers == 2
    with pytest.raises(BadSetting, match="--load-format dummy"):
        open_weights(str(folder), overrides={"moe_intermediate_size": 64})
    with pytest.raises(BadSetting, match="Unknown override 'no_such_key'"):
        open_weights(str(folder), overrides={"no_such_key": 1})


def test_bf16_experts_without_a_format_are_refused_with_the_mend(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    folder = write_gemma4(tmp_path, TINY, tensors)
    with pytest.raises(Unsupported, match=r"not bf16.*--layer-format experts=mxfp8 works"):
        load_model(LoadOptions(str(folder), device="cpu"))


# ---- random weights --------------------------------------------------------------------------------------------------


def test_presets_take_overrides_and_give_their_own_shapes() -> None:
    assert preset("gemma-4-26b-a4b", {}) == PRESETS["gemma-4-26b-a4b"]
    fewer = preset("gemma-4-26b-a4b", {"num_hidden_layers": 6})
    assert isinstance(fewer, Gemma4Config)
    assert fewer.formats == (MXFP8,) * 6
    a, b = (dummy_weights(gemma4_preset("gemma-4-tiny"), 5).layer(5, "cpu") for _ in range(2))
    assert isinstance(a.qkv, BlockScaled)
    assert isinstance(b.qkv, BlockScaled)
    assert torch.equal(a.qkv.values, b.qkv.values)
    assert a.qkv.shape == ((4 + 1) * 64, 160)
    assert decode(a.qkv).abs().max() < 0.2
    assert 0.02 < float(decode(a.qkv).square().mean().sqrt()) < 0.04


def test_one_tensor_serves_as_embedding_and_lm_head() -> None:
    ops = Ops(cpu(), Activations.BF16, Preference(), EXACT)
    model = Gemma4(dummy_weights(gemma4_preset("gemma-4-tiny")), ops, torch.device("cpu"))
    assert model.lm_head._packed.weight.data_ptr() == model.embed._weight.data_ptr()  # type: ignore[union-attr]


# ---- nvidia-modelopt itself ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_modelopt_exports_what_the_other_tests_write(name: str, tmp_path: Path) -> None:
    """The real exporter on a CPU: our own writer gives the same names, types and shapes, and both open."""
    quantize = pytest.importorskip("modelopt.torch.quantization", reason="nvidia-modelopt is not installed")
    export = pytest.importorskip("modelopt.torch.export")
    config = CASES[name]
    made = random_gemma4(config)
    model = transformers_gemma4(config, made).to(torch.bfloat16)
    prompt = torch.arange(16)[None]
    model = quantize.quantize(model, quantize.MXFP8_DEFAULT_CFG, lambda m: m(prompt))
    # Without the type the exporter takes the config's, which newer transformers give as a string.
    export.export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=tmp_path / "theirs")
    ours = write_gemma4(tmp_path / "ours", config, to_modelopt(made), ignore=routers(config))
    theirs, own = (load_file(folder / "model.safetensors") for folder in (tmp_path / "theirs", ours))
    assert {n: (t.dtype, t.shape) for n, t in theirs.items()} == {n: (t.dtype, t.shape) for n, t in own.items()}
    weights = open_weights(str(tmp_path / "theirs"))
    assert weights.config == replace(config, formats=(MXFP8,) * config.num_layers)
    truth = transformers_gemma4(config, plain(theirs))
    model = load_model(LoadOptions(str(tmp_path / "theirs"), device="cpu", dtype="float32"))
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
    found = {name: tensor for name, tensor in numbers.items() if not EXPERTS.match(name)}
    for layer in sorted({name.partition(".experts.")[0] for name in numbers if EXPERTS.match(name)}):
        experts = sorted({int(name.split(".")[3]) for name in numbers if name.startswith(f"{layer}.experts.")})
        gate, up, down = (
            torch.stack([numbers[f"{layer}.experts.{e}.{part}_proj.weight"] for e in experts])
            for part in ("gate", "up", "down")
        )
        found |= {f"{layer}.experts.gate_up_proj": torch.cat((gate, up), 1), f"{layer}.experts.down_proj": down}
    return found
