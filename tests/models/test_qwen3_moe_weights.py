"""Qwen3-MoE checkpoints: both layouts of the experts and both spellings of the config give the same; damage and
strangers are named; what would be computed wrongly is refused; dummies are stable."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeConfig as TheirConfig

from microscale.backends import quantise
from microscale.backends.ops import Ops, Preference
from microscale.backends.plan import Setup, make_plan
from microscale.backends.precision import EXACT, PRECISIONS, make_precision
from microscale.engine.loading.memory import weight_bytes
from microscale.engine.loading.options import LoadOptions
from microscale.errors import BadCheckpoint, BadConfig, BadSetting, Unsupported
from microscale.formats import BlockScaled, decode
from microscale.hardware import cpu
from microscale.kernels.op import Activations
from microscale.models.families import PRESETS, dummy_weights, open_weights, preset, read_model_config
from microscale.models.outline import outline
from microscale.models.qwen3_moe.config import Qwen3MoeConfig
from microscale.models.qwen3_moe.config_file import to_hugging_face
from microscale.models.qwen3_moe.model import Qwen3Moe
from microscale.models.rope import YarnRope
from microscale.models.weights import CheckpointWeights as Qwen3MoeCheckpoint
from support.live_bytes import LiveBytes
from support.loading import load_model
from support.tiny_qwen3_moe import (
    CASES,
    published,
    random_qwen3_moe,
    transformers_qwen3_moe,
    write_qwen3_moe,
)

TINY = CASES["as_published"]


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return random_qwen3_moe(TINY, seed=3)


@pytest.fixture
def folder(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    return write_qwen3_moe(tmp_path, TINY, published(tensors))


def change(folder: Path, **values: object) -> None:
    """Replace keys of config.json; ``...`` takes one away."""
    path = folder / "config.json"
    data = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))


def opened(folder: Path) -> Qwen3MoeCheckpoint:
    weights = open_weights(str(folder))
    assert isinstance(weights, Qwen3MoeCheckpoint)
    return weights


# ---- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [True, False])
def test_both_layouts_of_the_experts_give_the_same_tensors(
    apart: bool, tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    weights = opened(write_qwen3_moe(tmp_path, TINY, published(tensors) if apart else tensors))
    layer, prefix = weights.layer(1, "cpu"), "model.layers.1."
    assert torch.equal(layer.qkv, torch.cat([tensors[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"]))
    assert isinstance(layer.gate_up, Tensor)
    assert isinstance(layer.down, Tensor)
    assert torch.equal(layer.gate_up, tensors[f"{prefix}mlp.experts.gate_up_proj"])
    assert torch.equal(layer.down, tensors[f"{prefix}mlp.experts.down_proj"])
    assert torch.equal(layer.k_norm, tensors[f"{prefix}self_attn.k_norm.weight"])
    assert torch.equal(layer.router, tensors[f"{prefix}mlp.gate.weight"])
    assert torch.equal(weights.embed("cpu"), tensors["model.embed_tokens.weight"])
    assert torch.equal(weights.lm_head("cpu"), tensors["lm_head.weight"])


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_what_transformers_saves_is_read(name: str, original: bool, tmp_path: Path) -> None:
    """Config and tensors as ``save_pretrained`` writes them, in the published layout and in that of its own memory."""
    config, made = CASES[name], random_qwen3_moe(CASES[name])
    model = transformers_qwen3_moe(config, made).to(torch.bfloat16)
    model.save_pretrained(tmp_path, save_original_format=original)
    assert "num_local_experts" in json.loads((tmp_path / "config.json").read_text())
    names = load_file(tmp_path / "model.safetensors")
    assert ("model.layers.0.mlp.experts.0.up_proj.weight" in names) == original
    weights = opened(tmp_path)
    assert weights.config == config
    layer = weights.layer(0, "cpu")
    assert isinstance(layer.gate_up, Tensor)
    assert torch.equal(layer.gate_up, made["model.layers.0.mlp.experts.gate_up_proj"])
    assert config.tied or torch.equal(weights.lm_head("cpu"), made["lm_head.weight"])


@pytest.mark.parametrize("name", CASES)
def test_both_spellings_of_the_config_are_one(name: str, tmp_path: Path) -> None:
    config = CASES[name]
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(config)))
    assert read_model_config(tmp_path) == config
    TheirConfig(**to_hugging_face(config)).save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    assert read_model_config(tmp_path) == config


def test_heads_have_a_size_that_the_format_defines(folder: Path) -> None:
    change(folder, head_dim=..., num_attention_heads=4, hidden_size=64)
    config = read_model_config(folder)
    assert isinstance(config, Qwen3MoeConfig)
    assert config.head_dim == 16


def test_yarn_that_a_user_adds_stretches_the_context(folder: Path) -> None:
    """As the model card says: ``rope_scaling`` is added, and ``max_position_embeddings`` stays."""
    change(folder, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128})
    config = read_model_config(folder)
    assert isinstance(config, Qwen3MoeConfig)
    assert config.rope == YarnRope(1e6, 4.0, 32.0, 1.0, 128, truncate=True)
    assert config.max_context == 512
    assert read_model_config(folder, {"max_position_embeddings": 300}).max_context == 300


def test_end_tokens_are_those_of_generation_config(folder: Path) -> None:
    change(folder, eos_token_id=9)
    assert read_model_config(folder).eos_token_ids == (9,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 5, 9999]}')
    assert read_model_config(folder).eos_token_ids == (7, 5)
    assert read_model_config(folder, {"eos_token_id": [8]}).eos_token_ids == (8,)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("layers.1.mlp.experts.3.up_proj.weight", None, "lacks tensor 'model.layers.1.mlp.experts.3.up_proj.weight'"),
        ("layers.2.mlp.experts.3.down_proj.weight", lambda t: t[:, :16], "[64, 16], but the config asks for [64, 32]"),
        ("layers.0.self_attn.q_proj.weight", lambda t: t.half(), "has type F16, not BF16"),
        ("layers.2.self_attn.q_proj.bias", lambda t: torch.ones(64), "q_proj.bias' is no part"),
        ("layers.0.mlp.shared_expert.up_proj.weight", lambda t: torch.ones(64), "up_proj.weight' is no part"),
    ],
)
def test_damage_is_named_before_anything_is_read(
    folder: Path, name: str, damage: Callable[[Tensor | None], Tensor] | None, said: str
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


def test_nan_is_refused_when_it_is_read(folder: Path) -> None:
    path = folder / "model.safetensors"
    held = load_file(path)
    held["model.layers.1.mlp.experts.2.up_proj.weight"][3, 4] = torch.nan
    save_file(held, path)
    with pytest.raises(BadCheckpoint, match=re.escape("experts.2.up_proj.weight' contains NaN")):
        opened(folder).layer(1, "cpu")


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, Unsupported, "'quant_method' 'fp8' is not supported"),
        ({"attention_bias": True}, Unsupported, "'attention_bias' true is not supported"),
        ({"norm_topk_prob": False}, Unsupported, "'norm_topk_prob' false is not supported"),
        ({"norm_topk_prob": ...}, Unsupported, "'norm_topk_prob' false is not supported"),
        ({"hidden_act": "gelu"}, Unsupported, "'hidden_act' 'gelu' is not supported"),
        ({"use_sliding_window": True, "sliding_window": 64}, Unsupported, "'use_sliding_window' true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, Unsupported, "'layer_types' with sliding_attention"),
        ({"mlp_only_layers": [0]}, Unsupported, "'mlp_only_layers' is not supported"),
        ({"decoder_sparse_step": 2}, Unsupported, "'decoder_sparse_step' must be 1"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, Unsupported, "'rope_type' 'dynamic'"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}},
            Unsupported,
            "'mscale' is not supported; it would change the frequencies",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, BadConfig, "'original_max_position_embeddings'"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": ...}, BadConfig, "has no key 'rope_theta'"),
        ({"num_experts": ...}, BadConfig, "has no key 'num_experts'"),
        ({"num_local_experts": 3}, BadConfig, "and they differ"),
        ({"moe_intermediate_size": ...}, BadConfig, "has no key 'moe_intermediate_size'"),
        ({"moe_intermediate_size": 40}, BadConfig, "intermediate size 40 is not a multiple of the 32"),
        ({"num_key_value_heads": 3}, BadConfig, "8 heads cannot share 3 KV heads evenly"),
        ({"num_experts_per_tok": 17}, BadConfig, "17 experts per token cannot be chosen from 16"),
        ({"rope_theta": 0.5}, BadConfig, "rope theta 0.5 must be above 1"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    folder: Path, values: dict[str, object], error: type[Exception], said: str
) -> None:
    change(folder, **values)
    with pytest.raises(error, match=re.escape(said)) as raised:
        open_weights(str(folder))
    assert str(folder) in str(raised.value)


def test_overrides_of_a_checkpoint_change_no_shape(folder: Path) -> None:
    assert open_weights(str(folder), overrides={"num_hidden_layers": 2}).config.num_layers == 2
    with pytest.raises(BadSetting, match="--load-format dummy"):
        open_weights(str(folder), overrides={"moe_intermediate_size": 64})
    with pytest.raises(BadSetting, match="Unknown override 'num_local_experts'"):
        open_weights(str(folder), overrides={"num_local_experts": 8})


def test_experts_are_refused_with_the_mend_where_exact_is_asked_for(folder: Path) -> None:
    """No kernel reads BF16 experts: the user says what they become, or takes a plan that does."""
    options = LoadOptions(str(folder), device="cpu")
    with pytest.raises(Unsupported, match=r"not bf16.*--layer-format experts=mxfp8 works"):
        load_model(options)
    for name in ("balanced", "fast"):
        plan = load_model(replace(options, precision=PRECISIONS[name])).ops.plan
        assert plan.of("moe", "experts")[0].spec.weight_format == "mxfp8"


# ---- how it is loaded ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
def test_loading_holds_the_quantised_weights_and_one_layer(
    fmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are quantised layer by layer: the whole of them is never there in BF16."""
    monkeypatch.setattr(quantise, "CHUNK", 1 << 10)
    config = replace(TINY, num_layers=8)
    folder = write_qwen3_moe(tmp_path, config, published(random_qwen3_moe(config)))
    precision = make_precision(layer_formats=(f"experts={fmt}",))
    wish = Preference("reference")  # holds weights as they are quantised; its peak is the loader's
    setup = Setup(cpu(), Activations.FLOAT32, wish, precision)
    shape = outline("tiny", config, Activations.FLOAT32, 16, config.max_context)
    held = sum(weight_bytes(shape, make_plan("tiny", shape.uses, setup), setup).values())
    weights = opened(folder)
    with LiveBytes() as live:
        model = Qwen3Moe(weights, Ops(cpu(), Activations.FLOAT32, wish, precision), torch.device("cpu"))
    layer = sum(tensor.nbytes for tensor in vars(weights.layer(0, "cpu")).values())
    chunk = 5 * 4 * quantise.CHUNK
    assert len(model.layers) == 8
    assert live.peak <= held + layer + chunk
    assert held + layer + chunk < 8 * layer  # the bound has teeth


# ---- random weights --------------------------------------------------------------------------------------------------


def test_the_preset_is_the_published_model() -> None:
    """transformers' defaults are its sizes, but for layers, context and the weights of what was chosen."""
    theirs, ours = TheirConfig(), PRESETS["qwen3-30b-a3b"]
    assert isinstance(ours, Qwen3MoeConfig)
    assert (ours.hidden, ours.intermediate) == (theirs.hidden_size, theirs.moe_intermediate_size)
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (ours.num_experts, ours.top_k) == (theirs.num_experts, theirs.num_experts_per_tok)
    assert (ours.vocab_size, ours.rms_epsilon, ours.tied) == (151936, theirs.rms_norm_eps, theirs.tie_word_embeddings)
    numbers = ours.qkv_rows * ours.hidden + ours.hidden * ours.num_heads * ours.head_dim
    numbers += ours.num_experts * (3 * ours.intermediate * ours.hidden + ours.hidden)
    assert round((ours.num_layers * numbers + 2 * ours.vocab_size * ours.hidden) / 1e9, 1) == 30.5


@pytest.mark.parametrize("fmt", ["bf16", "mxfp4", "mxfp8"])
def test_random_weights_come_in_every_format_and_stay_the_same(fmt: str) -> None:
    fewer = preset("qwen3-moe-tiny", {"num_hidden_layers": 2})
    assert isinstance(fewer, Qwen3MoeConfig)
    assert (fewer.num_layers, fewer.expert_format) == (2, "mxfp8")
    config = replace(fewer, expert_format=fmt)
    a, b = (dummy_weights(config, 5).layer(1, "cpu") for _ in range(2))
    numbers = [w if isinstance(w, Tensor) else decode(w) for w in (a.gate_up, b.gate_up)]
    assert isinstance(a.gate_up, BlockScaled) == (fmt != "bf16")
    assert torch.equal(*numbers)
    assert numbers[0].shape == (8, 64, 160)
    assert 0.01 < float(numbers[0].float().square().mean().sqrt()) < 0.06


def test_one_tensor_serves_as_embedding_and_lm_head() -> None:
    config = PRESETS["qwen3-moe-tiny"]
    assert isinstance(config, Qwen3MoeConfig)
    ops = Ops(cpu(), Activations.BF16, Preference(), EXACT)
    model = Qwen3Moe(dummy_weights(replace(config, tied=True)), ops, torch.device("cpu"))
    assert model.lm_head._packed.weight.data_ptr() == model.embed._weight.data_ptr()  # type: ignore[union-attr]
