"""Quantised checkpoints of every container: logits equal transformers' on the same numbers, and faults are noticed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssForCausalLM

from microscale.engine.config import EngineConfig
from microscale.errors import BadCheckpoint, Unsupported
from microscale.formats import NVFP4, BlockScaled, decode, encode
from microscale.models.config import LayerKind, ModelConfig
from microscale.models.families import open_weights
from microscale.models.gemma4.config_file import to_text_config
from microscale.models.qwen3_moe.config import to_hugging_face
from microscale.models.storage import CONTAINERS as CONTAINERS_ON_DISK
from support import tiny_checkpoints, tiny_gemma4, tiny_qwen3_moe
from support.containers import CONTAINERS, quantise, write
from support.family_cases import logits_of, random_prompts
from support.forward import all_logits
from support.loading import load_model

# Widths of 160 and 320 leave ends behind squares of 128; every expert is used, so that no rounding changes a routing.
QWEN3_MOE, GEMMA4 = tiny_qwen3_moe.CASES["yarn_all_experts"], tiny_gemma4.CASES["all_experts"]
CASES: dict[str, ModelConfig] = {"qwen3_moe": QWEN3_MOE, "gemma4": GEMMA4}
ONLY = {"modelopt-nvfp4-experts": "gemma4", "quark-mxfp4": "qwen3_moe", "modelopt-mixed": "qwen3_moe"}
PAIRS = [(family, name) for name in CONTAINERS for family in CASES if ONLY.get(name, family) == family]


def write_case(folder: Path, family: str, name: str) -> dict[str, Tensor]:
    """A checkpoint in ``folder``, and the numbers in it."""
    container = CONTAINERS[name]
    if family == "qwen3_moe":
        stored, numbers = quantise(tiny_qwen3_moe.random_qwen3_moe(QWEN3_MOE), container)
        write(folder, to_hugging_face(QWEN3_MOE), stored, container)
        return numbers
    stored, numbers = quantise(tiny_gemma4.random_gemma4(GEMMA4), container)
    prefixed = {key if key.startswith("lm_head") else f"model.{key}": tensor for key, tensor in stored.items()}
    write(folder, to_text_config(GEMMA4), prefixed, container)
    return numbers


def truth(family: str, numbers: Mapping[str, Tensor]) -> Any:
    if family == "qwen3_moe":
        return tiny_qwen3_moe.transformers_qwen3_moe(QWEN3_MOE, numbers)
    return tiny_gemma4.transformers_gemma4(GEMMA4, numbers)


def difference(folder: Path, family: str, numbers: Mapping[str, Tensor], backend: str | None = None) -> float:
    """The largest difference of our logits to transformers', relative to their range."""
    prompts = random_prompts(CASES[family], (1, 33))
    model = load_model(EngineConfig(str(folder), device="cpu", dtype="float32", backend=backend))
    ours, theirs = all_logits(model, prompts, 1000), logits_of(truth(family, numbers), prompts)
    return max(float((a - b).abs().max() / (b.max() - b.min())) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_logits_equal_transformers(family: str, name: str, tmp_path: Path) -> None:
    numbers = write_case(tmp_path, family, name)
    for backend in ("reference", "dequantized"):
        assert difference(tmp_path, family, numbers, backend) <= 1e-5


# -- gpt-oss that was not quantised again

GPT_OSS = tiny_checkpoints.CASES["all_experts"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_fine_tune_of_gpt_oss_is_quantised_as_it_loads(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its numbers are MXFP4's own, so MXFP4 holds them exactly."""
    folder = tiny_checkpoints.write_plain(tmp_path, GPT_OSS, dtype=dtype)
    theirs = GptOssForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").float().eval()
    prompts = random_prompts(GPT_OSS, (1, 33))
    wanted = logits_of(theirs, prompts)
    for layer_format in ("experts=mxfp4", "experts=mxfp8"):
        options = EngineConfig(str(folder), device="cpu", dtype="float32", layer_format=(layer_format,))
        ours = all_logits(load_model(options), prompts, 1000)
        worst = max(float((a - b).abs().max() / (b.max() - b.min())) for a, b in zip(ours, wanted, strict=True))
        # FP16 has numbers between those of BF16; and those below 2**-14 that it lost in being written.
        assert worst <= (1e-5 if dtype == torch.bfloat16 else 1e-3)
    assert ("is in FP16; what is not quantised is rounded to BF16" in caplog.text) == (dtype == torch.float16)
    with pytest.raises(Unsupported, match=r"not bf16.*--layer-format experts="):
        load_model(EngineConfig(str(folder), device="cpu", dtype="float32"))


# -- what the libraries wrote

RECORDED = Path(__file__).parent / "recorded" / "containers.safetensors"
SAVED = {
    "modelopt nvfp4": ("modelopt", "nvfp4"),
    "modelopt mxfp8": ("modelopt", "mxfp8"),
    "compressed-tensors nvfp4": ("compressed-tensors", "nvfp4"),
    "compressed-tensors mxfp4": ("compressed-tensors", "mxfp4"),
    "compressed-tensors fp8": ("compressed-tensors", "fp8"),
    "compressed-tensors fp8 rows": ("compressed-tensors", "fp8"),
}


@pytest.mark.parametrize("name", SAVED)
def test_what_the_libraries_wrote_is_read_as_they_read_it(name: str) -> None:
    """``recorded/record_containers.py`` made the file, with nvidia-modelopt 0.47.0 and compressed-tensors 0.20.0."""
    container, fmt = SAVED[name]
    recorded = load_file(RECORDED)
    storage = CONTAINERS_ON_DISK[container][fmt]
    weight = storage.weight(storage.read("", lambda suffix: recorded[f"{name}/{suffix}"]))
    assert not isinstance(weight, Tensor)
    ours, theirs = decode(weight), recorded[f"{name}/numbers"]
    if name == "compressed-tensors nvfp4":  # it reads back bf16
        ours = ours.bfloat16().float()
    torch.testing.assert_close(ours, theirs, rtol=2**-23, atol=0)
    assert (ours - recorded["w"]).norm() / recorded["w"].norm() < (0.12 if "fp4" in name else 0.04)


def test_our_encoder_writes_what_modelopt_writes() -> None:
    recorded = load_file(RECORDED)
    ours = encode(recorded["w"], NVFP4)
    assert torch.equal(ours.values, recorded["modelopt nvfp4/.weight"])
    assert torch.equal(ours.scales, recorded["modelopt nvfp4/.weight_scale"].view(torch.uint8))
    assert ours.row_scales is not None
    assert torch.equal(ours.row_scales, recorded["modelopt nvfp4/.weight_scale_2"].expand(len(recorded["w"])))


@pytest.mark.parametrize(
    ("container", "codes", "global_scale", "number"),
    [
        ("modelopt", ".weight", ".weight_scale_2", 0.25),
        ("compressed-tensors", ".weight_packed", ".weight_global_scale", 4),
    ],
)
def test_both_conventions_of_the_global_scale_by_hand(
    container: str, codes: str, global_scale: str, number: float
) -> None:
    """Bytes 0x21 and 0xF7 are 0.5, 1, 6 and -6. The scale 0x40 is 2, the global one multiplies by a quarter."""
    stored = {
        codes: torch.tensor([[0x21, 0xF7, 0, 0, 0, 0, 0, 0]], dtype=torch.uint8),
        ".weight_scale": torch.tensor([[0x40]], dtype=torch.uint8).view(torch.float8_e4m3fn),
        global_scale: torch.tensor(number),
    }
    storage = CONTAINERS_ON_DISK[container]["nvfp4"]
    weight = storage.weight(storage.read("", lambda suffix: stored[suffix]))
    assert isinstance(weight, BlockScaled)
    assert decode(weight)[0, :5].tolist() == [0.25, 0.5, 3.0, -3.0, 0.0]


# -- seeded faults: what a reader could get wrong, done to the file


def inverse(tensors: dict[str, Tensor]) -> None:
    """The other convention of the global scale."""
    for name in tensors:
        if name.endswith((".weight_scale_2", ".weight_global_scale")):
            tensors[name] = 1 / tensors[name]


def swapped_nibbles(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.endswith((".weight", ".weight_packed")) and tensor.dtype == torch.uint8:
            tensors[name] = (tensor >> 4) | (tensor << 4)


def swapped_halves(tensors: dict[str, Tensor]) -> None:
    """Gate is up and up is gate. They have different global scales."""
    for name in [name for name in tensors if ".gate_proj." in name]:
        other = name.replace(".gate_proj.", ".up_proj.")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def one_scale_for_both_halves(tensors: dict[str, Tensor]) -> None:
    """The gate's global scale for its up rows too."""
    for name in tensors:
        if ".gate_proj.weight_global_scale" in name or ".gate_proj.weight_scale_2" in name:
            tensors[name.replace(".gate_proj.", ".up_proj.")] = tensors[name].clone()


@pytest.mark.parametrize("fault", [inverse, swapped_nibbles, swapped_halves, one_scale_for_both_halves])
@pytest.mark.parametrize("name", ["modelopt-nvfp4", "compressed-nvfp4"])
def test_a_seeded_fault_moves_the_logits(name: str, fault: Callable[[dict[str, Tensor]], None], tmp_path: Path) -> None:
    numbers = write_case(tmp_path, "qwen3_moe", name)
    tensors = load_file(tmp_path / "model.safetensors")
    fault(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    found = difference(tmp_path, "qwen3_moe", numbers)
    assert not found <= 1e-3, found  # nor is NaN


# -- tensors that are not what the config says


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")


EXPERT = "model.layers.1.mlp.experts.2.up_proj"


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        (
            "modelopt-nvfp4",
            lambda t: t.pop(f"{EXPERT}.weight_scale_2"),
            rf"lacks tensor '{EXPERT}.weight_scale_2', which its config asks for; it has '{EXPERT}.input_scale', '.*'",
        ),
        (
            "modelopt-nvfp4",
            lambda t: t.update({f"{EXPERT}.weight": torch.zeros(64, 160).bfloat16()}),
            rf"'{EXPERT}.weight' has shape \[64, 160\], but the config asks for \[64, 80\]",
        ),
        (
            "modelopt-nvfp4",
            lambda t: t.update({f"{EXPERT}.weight_scale": torch.zeros(64, 10, dtype=torch.uint8)}),
            r"has type U8, not F8_E4M3",
        ),
        (
            "compressed-nvfp4",
            lambda t: t.update({f"{EXPERT}.pre_quant_scale": torch.ones(160)}),
            rf"'{EXPERT}.pre_quant_scale' is no part of the model",
        ),
        (
            "fp8-blocks",
            lambda t: t.update({f"{EXPERT}.weight_scale_inv": torch.ones(1, 1)}),
            r"weight_scale_inv' has shape \[1, 1\], but the config asks for \[1, 2\]",
        ),
    ],
)
def test_tensors_that_contradict_the_config(
    name: str, edit: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    write_case(tmp_path, "qwen3_moe", name)
    change(tmp_path, edit)
    with pytest.raises(BadCheckpoint, match=message):
        open_weights(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "suffix", "bad", "message"),
    [
        ("modelopt-nvfp4", "weight_scale_2", torch.tensor(0.0), "a scale that is not above 0"),
        ("compressed-nvfp4", "weight_global_scale", torch.tensor([-1.0]), "a scale that is not above 0"),
        ("modelopt-nvfp4", "weight_scale", torch.full((64, 10), torch.nan).to(torch.float8_e4m3fn), "NaN"),
        ("compressed-mxfp4", "weight_scale", torch.full((64, 5), 255, dtype=torch.uint8), "the scale byte 255"),
        ("fp8-blocks", "weight_scale_inv", torch.full((1, 2), torch.inf).bfloat16(), "NaN or infinity"),
    ],
)
def test_scales_that_are_no_scales(name: str, suffix: str, bad: Tensor, message: str, tmp_path: Path) -> None:
    write_case(tmp_path, "qwen3_moe", name)
    change(tmp_path, lambda tensors: tensors.update({f"{EXPERT}.{suffix}": bad}))
    weights = open_weights(str(tmp_path))
    with pytest.raises(BadCheckpoint, match=rf"{EXPERT}.{suffix}' contains {message}"):
        weights.layer(1, "cpu")


def test_calibrated_scales_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_case(tmp_path, "qwen3_moe", "modelopt-nvfp4")
    with caplog.at_level("INFO"):
        open_weights(str(tmp_path))
    experts = 3 * QWEN3_MOE.num_experts
    found = QWEN3_MOE.num_layers * (experts + 4 + 2)  # input scales of experts and attention, scales of k and v
    assert f"{found} calibrated scales of activations and of the KV cache" in caplog.text


@pytest.mark.parametrize("name", ["{}_proj.{}_scale", "{}_scale"], ids=["modelopt", "compressed-tensors"])
def test_scales_of_the_kv_cache_are_used_where_it_is_in_fp8(name: str, tmp_path: Path) -> None:
    numbers = write_case(tmp_path, "qwen3_moe", "fp8-blocks")
    wanted = {
        f"model.layers.{layer}.self_attn.{name.format(*part * name.count('{}'))}": torch.tensor(0.01 + layer / 64)
        for layer in range(QWEN3_MOE.num_layers)
        for part in "kv"
    }
    change(tmp_path, lambda tensors: tensors.update(wanted))
    options = EngineConfig(str(tmp_path), device="cpu", dtype="float32", kv_cache_dtype="fp8")
    model = load_model(options)
    layers = model.new_cache(dict.fromkeys(LayerKind, 4)).layers
    for layer_idx, layer in enumerate(layers):
        for scale in (layer.k_scale, layer.v_scale):
            assert scale is not None
            assert scale.unique().tolist() == [pytest.approx(0.01 + layer_idx / 64)]
    prompts = random_prompts(QWEN3_MOE, (1, 33))
    ours, theirs = all_logits(model, prompts, 1000), logits_of(truth("qwen3_moe", numbers), prompts)
    for found, exact in zip(ours, theirs, strict=True):
        assert (found - exact).norm() / exact.norm() < 0.1
    change(tmp_path, lambda tensors: tensors.update(dict.fromkeys(list(wanted)[:1], torch.tensor(0.0))))
    with pytest.raises(BadCheckpoint, match="is no scale: it must be one number above 0"):
        load_model(options)


def test_the_kv_cache_of_other_checkpoints_has_scale_1(tmp_path: Path) -> None:
    write_case(tmp_path, "qwen3_moe", "fp8-blocks")
    model = load_model(EngineConfig(str(tmp_path), device="cpu", dtype="float32", kv_cache_dtype="fp8"))
    first = model.new_cache(dict.fromkeys(LayerKind, 4)).layers[0]
    assert first.k_scale is not None
    assert first.k_scale.unique().tolist() == [1.0]
