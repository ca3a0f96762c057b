"""The registry of families: every model type and every preset belongs to exactly one record."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from microscale.backends.ops import Ops, Preference
from microscale.errors import Unsupported
from microscale.hardware import cpu
from microscale.kernels.op import Activations
from microscale.models.families import FAMILIES, PRESETS, build_model, open_weights, preset, read_model_config


def test_names_are_of_one_family_each() -> None:
    types = Counter(name for family in FAMILIES for name in family.model_types)
    presets = Counter(name for family in FAMILIES for name in family.presets)
    assert set(types.values()) == set(presets.values()) == {1}
    assert list(presets) == list(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_comes_back_from_its_own_family(name: str) -> None:
    config = preset(name, {})
    assert config == PRESETS[name]
    [family] = [family for family in FAMILIES if isinstance(config, family.config)]
    assert name in family.presets
    assert preset(name, {"max_position_embeddings": 4096}).max_context == 4096


@pytest.mark.parametrize("name", ["gpt-oss-tiny", "gemma-4-tiny", "qwen3-moe-tiny"])
def test_weights_know_their_model(name: str) -> None:
    weights = open_weights(name, load_format="dummy", overrides={"num_hidden_layers": 1})
    heard: list[int] = []
    model = build_model(
        weights, Ops(cpu(), Activations.BF16, Preference()), torch.device("cpu"), 16, lambda: heard.append(1)
    )
    assert model.config is weights.config
    assert len(heard) == weights.config.num_layers == 1


def test_a_folder_without_a_family_is_told_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    known = ", ".join(repr(name) for family in FAMILIES for name in family.model_types)
    with pytest.raises(Unsupported, match=f"'llama' is not supported; supported are {known}"):
        read_model_config(tmp_path)
