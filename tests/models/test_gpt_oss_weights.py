"""gpt-oss weights: both layouts give the same tensors, transformers agrees, damage is named, dummies are stable."""

from __future__ import annotations

import dataclasses
import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from microscale.errors import BadCheckpoint, BadConfig, BadSetting, Unsupported
from microscale.formats import BlockScaled, decode
from microscale.models.dummy_weights import RandomTensors
from microscale.models.families import open_weights
from microscale.models.gpt_oss.config import GptOssConfig
from microscale.models.gpt_oss.weights import GptOssLayer as LayerTensors
from microscale.models.weights import CheckpointWeights
from support.families import dummy_gpt_oss, gpt_oss_preset, gpt_oss_weights
from support.tiny_checkpoints import CASES, has_original_form, random_tensors, write_hf, write_original
from support.truth import load_transformers

TINY = CASES["heads_4_2"]
ORIGINAL_CASES = [name for name, config in CASES.items() if has_original_form(config)]


def assert_same(ours: LayerTensors, theirs: LayerTensors) -> None:
    for field in dataclasses.fields(LayerTensors):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(a, BlockScaled):
            assert torch.equal(a.values, b.values), field.name
            assert torch.equal(a.scales, b.scales), field.name
        else:
            assert a.dtype == b.dtype, field.name
            assert torch.equal(a, b), field.name


def expected_shapes(c: GptOssConfig) -> dict[str, tuple[int, ...]]:
    experts, hidden, q_rows = c.num_experts, c.hidden, c.num_heads * c.head_dim
    qkv_rows = q_rows + 2 * c.num_kv_heads * c.head_dim
    return {
        "attn_norm": (hidden,),
        "qkv_weight": (qkv_rows, hidden),
        "qkv_bias": (qkv_rows,),
        "sinks": (c.num_heads,),
        "o_weight": (hidden, q_rows),
        "o_bias": (hidden,),
        "mlp_norm": (hidden,),
        "router_weight": (experts, hidden),
        "router_bias": (experts,),
        "gate_up": (experts, 2 * c.intermediate, hidden),
        "gate_up_bias": (experts, 2 * c.intermediate),
        "down": (experts, hidden, c.intermediate),
        "down_bias": (experts, hidden),
    }


def assert_shapes(layer: LayerTensors, config: GptOssConfig) -> None:
    for name, shape in expected_shapes(config).items():
        assert tuple(getattr(layer, name).shape) == shape, name


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_hugging_face_layout(name: str, shards: int, tmp_path: Path) -> None:
    config = CASES[name]
    weights = gpt_oss_weights(str(write_hf(tmp_path, config, seed=3, shards=shards)))
    tensors = random_tensors(config, seed=3)
    assert isinstance(weights, CheckpointWeights)
    assert weights.config == config
    assert torch.equal(weights.embed("cpu"), tensors["model.embed_tokens.weight"])
    assert torch.equal(weights.norm("cpu"), tensors["model.norm.weight"])
    assert torch.equal(weights.lm_head("cpu"), tensors["lm_head.weight"])
    for layer_idx in range(config.num_layers):
        layer = weights.layer(layer_idx, "cpu")
        assert_shapes(layer, config)
        prefix = f"model.layers.{layer_idx}."
        first_k = config.num_heads * config.head_dim
        assert torch.equal(layer.qkv_weight[:first_k], tensors[prefix + "self_attn.q_proj.weight"])
        assert torch.equal(layer.qkv_bias[first_k:].chunk(2)[1], tensors[prefix + "self_attn.v_proj.bias"])
        assert torch.equal(layer.down.values.flatten(), tensors[prefix + "mlp.experts.down_proj_blocks"].flatten())


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", ORIGINAL_CASES)
def test_original_layout_is_the_same_model(name: str, shards: int, tmp_path: Path) -> None:
    config = CASES[name]
    ours = gpt_oss_weights(str(write_hf(tmp_path / "hf", config)))
    theirs = gpt_oss_weights(str(write_original(tmp_path / "original", config, shards=shards)))
    assert isinstance(theirs, CheckpointWeights)
    assert theirs.config == ours.config
    for part in ("embed", "norm", "lm_head"):
        assert torch.equal(getattr(ours, part)("cpu"), getattr(theirs, part)("cpu"))
    for layer_idx in range(config.num_layers):
        assert_same(theirs.layer(layer_idx, "cpu"), ours.layer(layer_idx, "cpu"))


def test_original_norms_may_be_float32(tmp_path: Path) -> None:
    path = write_original(tmp_path, TINY) / "model.safetensors"
    tensors = load_file(path)
    save_file({name: t.float() if name.endswith("norm.scale") else t for name, t in tensors.items()}, path)
    assert gpt_oss_weights(str(tmp_path)).layer(0, "cpu").attn_norm.dtype == torch.float32


@pytest.mark.parametrize("name", CASES)
def test_transformers_loads_the_same_numbers_and_runs(name: str, tmp_path: Path) -> None:
    config = CASES[name]
    folder = write_hf(tmp_path, config, shards=2)
    truth = load_transformers(folder)
    weights = gpt_oss_weights(str(folder))
    for layer_idx, theirs in enumerate(truth.model.layers):
        ours = weights.layer(layer_idx, "cpu")
        # transformers keeps experts as [E, K, rows].
        assert torch.equal(decode(ours.gate_up).transpose(1, 2), theirs.mlp.experts.gate_up_proj)
        assert torch.equal(decode(ours.down).transpose(1, 2), theirs.mlp.experts.down_proj)
        attention = theirs.self_attn
        qkv = [getattr(attention, f"{part}_proj").weight for part in "qkv"]
        assert torch.equal(ours.qkv_weight.float(), torch.cat(qkv))
        assert torch.equal(ours.sinks.float(), attention.sinks)
    # Beyond the window and the original context. Logits with a spread of about 2 decide, and not all for one token.
    ids = torch.randint(config.vocab_size, (1, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = truth(ids).logits[0]
    assert torch.isfinite(logits).all()
    assert 1 < logits.std() < 5
    assert len(set(logits.argmax(-1).tolist())) > 10


def test_experts_are_views_of_what_was_read(tmp_path: Path) -> None:
    weights = gpt_oss_weights(str(write_hf(tmp_path, TINY)))
    values = weights.layer(0, "cpu").down.values
    assert values.is_contiguous()
    assert values.untyped_storage().nbytes() == values.nbytes
    assert values._base is not None


# -- overrides


def test_fewer_layers_of_a_real_checkpoint(tmp_path: Path) -> None:
    folder = str(write_hf(tmp_path, CASES["heads_6_3"]))
    weights = gpt_oss_weights(folder, overrides={"num_hidden_layers": 2, "sliding_window": 3})
    assert (weights.config.num_layers, weights.config.sliding_window) == (2, 3)
    assert_same(weights.layer(1, "cpu"), gpt_oss_weights(folder).layer(1, "cpu"))


def test_overrides_cannot_change_shapes(tmp_path: Path) -> None:
    folder = str(write_hf(tmp_path, TINY))
    with pytest.raises(BadSetting, match=r"overrides hidden_size ask for tensor '\S+' in shape .* --load-format dummy"):
        open_weights(folder, overrides={"hidden_size": 96})
    assert open_weights(folder, overrides={"hidden_size": 96}, load_format="dummy").config.hidden == 96


# -- damage, through the whole way in


def damage(folder: Path, name: str, tensor: torch.Tensor | None) -> str:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
    return str(folder)


SINKS = "model.layers.1.self_attn.sinks"
SCALES = "model.layers.0.mlp.experts.down_proj_scales"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (SINKS, None, f"lacks tensor '{SINKS}'"),
        (
            SINKS,
            torch.zeros(5, dtype=torch.bfloat16),
            rf"tensor '{SINKS}' has shape \[5\], but the config asks for \[4\]",
        ),
        (SINKS, torch.zeros(4), f"tensor '{SINKS}' has type F32, not BF16"),
        (SCALES, torch.zeros(4, 64, 1, dtype=torch.int8), f"tensor '{SCALES}' has type I8, not U8"),
        ("model.layers.2.self_attn.sinks", torch.zeros(4), "'model.layers.2.self_attn.sinks' is no part of the model"),
        ("rotary.inv_freq", torch.zeros(4), "'rotary.inv_freq' is no part of the model"),
    ],
)
def test_bad_tensors_are_found_before_any_is_read(
    name: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    folder = damage(write_hf(tmp_path, TINY), name, tensor)
    with pytest.raises(BadCheckpoint, match=message):
        open_weights(folder)


def test_nan_is_found_when_its_layer_is_read(tmp_path: Path) -> None:
    folder = write_hf(tmp_path, TINY)
    damage(folder, SINKS, torch.full((4,), torch.nan, dtype=torch.bfloat16))
    weights = gpt_oss_weights(damage(folder, SCALES, torch.full((4, 64, 1), 255, dtype=torch.uint8)))
    with pytest.raises(BadCheckpoint, match=rf"model\.safetensors: tensor '{SCALES}' contains the scale byte 255"):
        weights.layer(0, "cpu")
    with pytest.raises(BadCheckpoint, match=rf"model\.safetensors: tensor '{SINKS}' contains NaN"):
        weights.layer(1, "cpu")


def test_config_of_one_layout_with_tensors_of_the_other(tmp_path: Path) -> None:
    write_original(tmp_path, TINY)
    (tmp_path / "config.json").write_text((write_hf(tmp_path / "hf", TINY) / "config.json").read_text())
    with pytest.raises(BadCheckpoint, match=r"lacks tensor 'model\.embed_tokens\.weight'"):
        open_weights(str(tmp_path))


def test_config_that_promises_other_experts(tmp_path: Path) -> None:
    folder = write_hf(tmp_path, TINY)
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | {"num_local_experts": 8}))
    with pytest.raises(BadCheckpoint, match=r"router\.weight' has shape \[4, 64\], but the config asks for \[8, 64\]"):
        open_weights(str(folder))
    (folder / "config.json").write_text(json.dumps(data | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(Unsupported, match="'quant_method' 'fp8' is not supported"):
        open_weights(str(folder))


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    folder = write_hf(tmp_path, TINY)
    damage(folder, SINKS, None)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(BadCheckpoint):
        open_weights(str(folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


# -- names that are no checkpoint


def test_preset_without_dummy_says_what_to_add() -> None:
    with pytest.raises(BadCheckpoint, match="gpt-oss-20b is a preset without weights: add --load-format dummy"):
        open_weights("gpt-oss-20b")


def test_a_folder_called_like_a_preset_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_hf(Path("gpt-oss-tiny"), TINY)
    assert open_weights("gpt-oss-tiny").config == TINY


def test_unknown_names_and_formats(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="'gpt-oss-7b' is neither an existing folder, nor a hub id"):
        open_weights("gpt-oss-7b", load_format="dummy")
    with pytest.raises(BadSetting, match="Unknown load format 'gguf'; known are auto, safetensors, dummy"):
        open_weights("gpt-oss-tiny", load_format="gguf")
    with pytest.raises(BadConfig, match=r"has no config\.json"):
        open_weights(str(tmp_path))


# -- dummies


def test_dummy_shapes_and_numbers() -> None:
    weights = gpt_oss_weights("gpt-oss-tiny", load_format="dummy", seed=1)
    config = gpt_oss_preset("gpt-oss-tiny")
    assert weights.config == config
    layer = weights.layer(2, "cpu")
    assert_shapes(layer, config)
    assert weights.embed("cpu").shape == weights.lm_head("cpu").shape == (config.vocab_size, config.hidden)
    assert (weights.norm("cpu").float() - 1).abs().max() < 0.5
    assert weights.embed("cpu").float().std() == pytest.approx(0.02, rel=0.05)
    assert decode(layer.gate_up).square().mean().sqrt() == pytest.approx(0.047, rel=0.05)
    assert set(layer.down.scales.unique().tolist()) == {118, 119, 120, 121, 122}
    assert len(layer.down.values.unique()) == 256
    for name in ("qkv_bias", "sinks", "o_bias", "router_bias", "gate_up_bias", "down_bias"):
        assert getattr(layer, name).count_nonzero() == getattr(layer, name).numel(), name


def test_dummy_does_not_depend_on_the_order_of_calls() -> None:
    one, other = (dummy_gpt_oss(gpt_oss_preset("gpt-oss-tiny"), RandomTensors(5)) for _ in range(2))
    forwards = [one.layer(i, "cpu") for i in range(4)]
    backwards = [other.layer(i, "cpu") for i in reversed(range(4))]
    for ours, theirs in zip(forwards, reversed(backwards), strict=True):
        assert_same(ours, theirs)
    assert torch.equal(one.embed("cpu"), other.embed("cpu"))


def test_dummy_depends_on_seed_and_name() -> None:
    config = gpt_oss_preset("gpt-oss-tiny")
    zero, one = (dummy_gpt_oss(config, RandomTensors(seed)) for seed in (0, 1))
    assert not torch.equal(zero.layer(0, "cpu").down.values, one.layer(0, "cpu").down.values)
    assert not torch.equal(zero.layer(0, "cpu").down.values, zero.layer(1, "cpu").down.values)
    assert not torch.equal(zero.embed("cpu"), zero.lm_head("cpu"))


def test_tiny_preset_is_a_few_megabytes() -> None:
    weights = dummy_gpt_oss(gpt_oss_preset("gpt-oss-tiny"), RandomTensors())
    total = weights.embed("cpu").nbytes + weights.lm_head("cpu").nbytes + weights.norm("cpu").nbytes
    for layer_idx in range(weights.config.num_layers):
        layer = weights.layer(layer_idx, "cpu")
        total += sum(getattr(layer, field.name).nbytes for field in dataclasses.fields(LayerTensors))
    assert 1e6 < total < 8e6


def test_dummy_from_a_folder_needs_only_its_config(tmp_path: Path) -> None:
    folder = write_hf(tmp_path, TINY)
    (folder / "model.safetensors").unlink()
    assert_shapes(gpt_oss_weights(str(folder), load_format="dummy").layer(0, "cpu"), TINY)


@pytest.mark.slow
def test_a_layer_of_120b_costs_its_own_bytes() -> None:
    weights = gpt_oss_weights("gpt-oss-120b", load_format="dummy", overrides={"num_hidden_layers": 2})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    layer = weights.layer(0, "cpu")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    own = sum(getattr(layer, field.name).nbytes for field in dataclasses.fields(LayerTensors))
    # In BF16 the experts alone would be 6.4 GB; a tenth is left for the allocator.
    assert own == pytest.approx(1.76e9, rel=0.02)
    assert grown < 1.1 * own
