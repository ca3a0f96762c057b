"""The models that ``doctor`` lists: what fits, how fast, and what is on the disk."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest

from microscale import hardware
from microscale.explain.models_here import models_here, on_disk
from microscale.planning import cpu_rates

HUB_ID = "openai/gpt-oss-20b"


def test_an_rtx_5090_holds_20b_but_not_120b(monkeypatch: pytest.MonkeyPatch) -> None:
    card = hardware.known("rtx5090")
    monkeypatch.setattr(hardware, "present", lambda: card)
    monkeypatch.setattr(hardware, "available_memory", lambda gpu: gpu.memory_bytes)
    found = {model.model: model for model in models_here()}
    small, large = found["gpt-oss-20b"], found["gpt-oss-120b"]
    assert (small.fits, small.precision) == (True, "exact")
    assert small.low is not None
    assert small.tok_s is not None
    assert small.high is not None
    assert small.low < small.tok_s < small.high
    assert (large.fits, large.tok_s) == (False, None)
    assert large.needed_gib > large.usable_gib


def test_a_cpu_has_the_speed_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "present", hardware.cpu)
    monkeypatch.setattr(hardware, "available_memory", lambda gpu: 32 * hardware.GIB)
    monkeypatch.setattr(cpu_rates, "read_rate", lambda: 10e9)
    monkeypatch.setattr(cpu_rates, "decode_rate", lambda name: 10e6)
    small = next(models_here())
    assert small.model == "gpt-oss-20b"
    if small.fits:  # on a machine whose total memory is large enough
        assert small.basis == "at most"
        assert small.tok_s is not None
        assert small.tok_s < 0.02


def test_a_model_is_on_the_disk_when_all_of_its_weights_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = huggingface_hub.try_to_load_from_cache
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda repo, name: real(repo, name, cache_dir=tmp_path)
    )
    assert on_disk(HUB_ID) == "no"
    repository = tmp_path / "models--openai--gpt-oss-20b"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text("{}")
    shards = ["model-1.safetensors", "model-2.safetensors"]
    index = {"weight_map": dict(zip("ab", shards, strict=True))}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / shards[0]).touch()
    assert on_disk(HUB_ID) == "in part"
    (snapshot / shards[1]).touch()
    assert on_disk(HUB_ID) == "yes"
