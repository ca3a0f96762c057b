"""Which modules a checkpoint's config says are quantised: published configs, and damaged and contradictory ones."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from microscale.errors import BadConfig, MicroscaleError, Unsupported
from microscale.models.gemma4.config_file import PREFIXES
from microscale.models.json_object import JsonObject
from microscale.models.quantization import Quantisation, read_quantisation
from support.containers import CONTAINERS, NVFP4_GROUP, compressed, group


def read(folder: Path, config: Mapping[str, Any] | None, own_file: Mapping[str, Any] | None = None) -> Quantisation:
    if own_file is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": own_file}))
    data = {} if config is None else {"quantization_config": config}
    return read_quantisation(folder, JsonObject("config.json", data), PREFIXES)


GEMMA_PREFIX = "model.language_model.layers"
NVIDIA_GEMMA4: dict[str, Any] = {
    "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
    "exclude_modules": [
        "lm_head", "model.embed_vision*", "model.vision_tower*",
        *(f"{GEMMA_PREFIX}.{n}.{part}*" for n in range(3) for part in ("mlp", "router", "self_attn")),
    ],
}  # fmt: skip
"""As nvidia/Gemma-4-26B-A4B-NVFP4 has it, for three layers."""
EXPERT = "layers.1.experts.7.up_proj"


def test_nvidias_gemma4_has_only_its_experts_quantised(tmp_path: Path) -> None:
    found = read(tmp_path, None, NVIDIA_GEMMA4)
    assert found.container == "modelopt"
    assert not found.weights_only
    assert found.module(EXPERT) == "nvfp4"
    for name in ("mlp.gate_proj", "router.proj", "self_attn.q_proj"):
        assert found.module(f"layers.1.{name}") == "bf16"
    assert found.module("lm_head") == "bf16"
    assert found.format(1, ("mlp.gate_proj", "mlp.up_proj")) == "bf16"


def test_layers_of_mixed_precision_are_those_listed(tmp_path: Path) -> None:
    """As nvidia/Qwen3.6-35B-A3B-NVFP4: the container of the experts is listed, not each of them."""
    layers = {
        "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        f"{GEMMA_PREFIX}.0.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        f"{GEMMA_PREFIX}.0.self_attn.q_proj": {"quant_algo": "FP8"},
    }
    config = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "ignore": ["mtp*"],
        "quantized_layers": layers,
    }
    found = read(tmp_path, config, {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8"})
    assert found.module("lm_head") == found.module("layers.0.mlp.experts.255.down_proj") == "nvfp4"
    assert found.module("layers.0.self_attn.q_proj") == "fp8"
    assert found.weights_only
    assert found.module("layers.0.mlp.gate") == found.module("layers.1.mlp.experts.0.down_proj") == "bf16"


def test_names_and_expressions_of_compressed_tensors(tmp_path: Path) -> None:
    """A name is exact and an expression matches from the beginning, on names as the model has them."""
    ignore = ["lm_head", "re:.*router", "re:.*vision_tower.*", "model.language_model.layers.0.self_attn.q_proj"]
    found = read(tmp_path, compressed("nvfp4-pack-quantized", ignore, group_0=group(["Linear"], None, **NVFP4_GROUP)))
    assert found.module("layers.0.self_attn.q_proj") == "bf16"
    assert found.module("layers.0.self_attn.k_proj") == found.module(EXPERT) == "nvfp4"
    assert found.module("layers.2.router.proj") == found.module("lm_head") == "bf16"
    groups = {
        "group_0": group(["Linear"], "nvfp4-pack-quantized", **NVFP4_GROUP),
        "group_1": group([r"re:model\.language_model\.layers\.1\..*"], "float-quantized", strategy="channel"),
        "group_2": group(["model.layers.2.mlp.up_proj"], "float-quantized", strategy="tensor"),
    }
    found = read(tmp_path, compressed("mixed-precision", [], **groups))
    assert found.module(EXPERT) == "fp8"
    assert found.module("layers.2.mlp.up_proj") == "fp8"
    assert found.module("layers.2.mlp.gate_proj") == "nvfp4"


def test_groups_without_activations_are_weights_only(tmp_path: Path) -> None:
    """As llm-compressor's schemes NVFP4A16 and NVFP4, and FP8 next to them, which says nothing of NVFP4."""
    narrow = group(["Linear"], None, **NVFP4_GROUP) | {"input_activations": {"num_bits": 4, "type": "float"}}
    assert not read(tmp_path, compressed("nvfp4-pack-quantized", [], group_0=narrow)).weights_only
    plain = group(["Linear"], None, **NVFP4_GROUP) | {"input_activations": None}
    assert read(tmp_path, compressed("nvfp4-pack-quantized", [], group_0=plain)).weights_only
    eight = plain | {"input_activations": {"num_bits": 8, "type": "float"}}
    assert read(tmp_path, compressed("nvfp4-pack-quantized", [], group_0=eight)).weights_only
    channels = group(["Linear"], None, strategy="channel") | {"input_activations": None}
    assert not read(tmp_path, compressed("float-quantized", [], group_0=channels)).weights_only


def test_what_is_held_as_one_tensor_has_one_format(tmp_path: Path) -> None:
    left_out = [*NVIDIA_GEMMA4["exclude_modules"], "*.2.experts.0.up_proj"]
    found = read(tmp_path, None, NVIDIA_GEMMA4 | {"exclude_modules": left_out})
    with pytest.raises(Unsupported, match=r"layer 2 has experts.0.up_proj in BF16 and the rest of .* in NVFP4"):
        found.format(2, ("experts.0.gate_proj", "experts.0.up_proj"))
    with pytest.raises(Unsupported, match=r"are in NVFP4 in layer 0 and in BF16 in layer 2; supported is one format"):
        read(tmp_path, None, NVIDIA_GEMMA4 | {"exclude_modules": ["*.2.experts*"]}).uniform(
            range(3), ("experts.0.up_proj",)
        )


def changed(name: str, *path: str, value: object) -> dict[str, Any]:
    """A container's config with another value; ``...`` removes the key."""
    config: dict[str, Any] = copy.deepcopy(dict(CONTAINERS[name].config or {}))
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return config


WEIGHTS = ("config_groups", "group_0", "weights")
QUARK = ("global_quant_config", "weight")
FAULTS: list[tuple[dict[str, Any], type[MicroscaleError], str]] = [
    (changed("modelopt-nvfp4", "quant_method", value="awq"), Unsupported, "the weights are in AWQ, which Micro"),
    (changed("modelopt-nvfp4", "quant_algo", value="W4A8_AWQ"), Unsupported, "in W4A8_AWQ (modelopt)"),
    (changed("modelopt-nvfp4", "quant_algo", value="NVFP4_SVDQUANT"), Unsupported, "in NVFP4_SVDQUANT (modelopt)"),
    (changed("modelopt-nvfp4", "quant_algo", value=4), BadConfig, "'quant_algo' must be a string, not 4"),
    (changed("modelopt-nvfp4", "ignore", value=[3]), BadConfig, "'ignore' must be a list of module names"),
    (changed("modelopt-nvfp4", "group_size", value=32), BadConfig, "'group_size' is 32, but NVFP4 has groups of 16"),
    (changed("modelopt-mixed", "quantized_layers", value={}), BadConfig, "'quantized_layers' is empty, so 'MIXED_PREC"),
    (changed("modelopt-mixed", "quantized_layers", value=...), BadConfig, "has no key 'quantized_layers'"),
    (
        changed("compressed-nvfp4", "format", value="pack-quantized"),
        Unsupported,
        "compressed-tensors (pack-quant",
    ),
    (changed("compressed-nvfp4", "format", value="float-quantized"), Unsupported, "(float-quantized, tensor_group)"),
    (changed("compressed-nvfp4", "config_groups", value=...), BadConfig, "has no key 'config_groups'"),
    (changed("compressed-nvfp4", "config_groups", value={}), BadConfig, "'config_groups' has no group"),
    (
        changed("compressed-nvfp4", "quantization_status", value="frozen"),
        BadConfig,
        "so the weights are not compressed",
    ),
    (
        changed("compressed-nvfp4", "transform_config", value={"a": 1}),
        Unsupported,
        "'transform_config' is not",
    ),
    (
        changed("compressed-nvfp4", "ignore", value=["re:("]),
        BadConfig,
        "'ignore' holds 're:(', which is no reg",
    ),
    (
        changed("compressed-nvfp4", *WEIGHTS, "num_bits", value=8),
        BadConfig,
        "'num_bits' is 8, but 'nvfp4-pack",
    ),
    (changed("compressed-nvfp4", *WEIGHTS, "group_size", value=32), BadConfig, "is 32, but NVFP4 has groups of 16"),
    (changed("compressed-nvfp4", *WEIGHTS, "symmetric", value=False), Unsupported, "'symmetric' false"),
    (
        changed("compressed-fp8-blocks", *WEIGHTS, "block_structure", value=[64, 64]),
        BadConfig,
        "is [64, 64]; supp",
    ),
    (changed("quark-mxfp4", *QUARK, "dtype", value="int4"), Unsupported, "in Quark (int4 per_group e8m0)"),
    (changed("quark-mxfp4", *QUARK, "group_size", value=16), BadConfig, "is 16, but MXFP4 has groups of 32"),
    (changed("quark-mxfp4", "export", "weight_format", value="fake_quantized"), Unsupported, "'fake_quantized'"),
    (changed("fp8-blocks", "weight_block_size", value=[64, 128]), BadConfig, "is [64, 128]; supported is [128, 128]"),
    (changed("fp8-blocks", "fmt", value="e5m2"), Unsupported, "'fmt' 'e5m2' is not supported"),
]


@pytest.mark.parametrize(("config", "error", "message"), FAULTS, ids=lambda value: str(value)[:40])
def test_a_damaged_config_is_one_sentence(
    config: dict[str, Any], error: type[MicroscaleError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=re.escape(message)) as raised:
        read(tmp_path, config)
    assert "\n" not in str(raised.value)
    assert "config.json" in str(raised.value)


def test_two_files_that_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"says 'quant_algo' 'NVFP4' and hf_quant_config.json 'FP8'; remove the one"):
        read(tmp_path, CONTAINERS["modelopt-nvfp4"].config, {"quant_algo": "FP8"})
    assert read(tmp_path, None, None).container == "modelopt", "the old file alone is enough"
