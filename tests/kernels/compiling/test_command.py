"""``microscale warm``: what it compiles, what it finds there, and what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from triton import knobs
from typer.testing import CliRunner

from microscale.cli import app
from microscale.cli import warm as command
from microscale.cli.warm import Summary, fill, show
from microscale.errors import BadSetting
from microscale.hardware import KNOWN, Gpu, known
from microscale.kernels.compiling.cache import use_cache
from microscale.models.recorded import bind_shapes, record
from microscale.planning.ops import Activations, Kernel, Ops, Preference
from microscale_lab.prove import inventory

GB10 = known("gb10")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with knobs.cache.scope(), knobs.compilation.scope():
        yield use_cache(tmp_path / "kernels")


def small_kernels() -> list[Kernel]:
    model = bind_shapes(inventory.models()["demo"], Ops(GB10, Activations.BF16, Preference()))
    return [kernel for kernel in record(model) if kernel.short_name == "rms_norm"][:2]


def test_a_folder_is_filled_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = small_kernels()
    first = fill("demo", GB10, kernels, folder, 2)
    assert (first.kernels, first.compiled, first.failed) == (2, 2, [])
    assert first.folder == str(folder)
    assert 0.01 < first.cache_mb < 1.0
    bad = replace(kernels[0], options=(("num_warps", 3),))
    again = fill("demo", GB10, [*kernels, bad], folder, 2)
    assert (again.kernels, again.compiled) == (3, 0)
    assert len(again.failed) == 1
    assert again.failed[0].startswith(bad.label)
    assert json.loads(json.dumps(asdict(again)))["failed"] == again.failed
    show(again)
    shown = capsys.readouterr()
    assert f"demo on NVIDIA GB10: 3 kernels, 0 compiled in {again.seconds} s, 2 were in the cache." in shown.out
    assert str(folder) in shown.out
    assert "power of 2" in shown.err


def test_the_command_fills_the_named_folder_with_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling all of it takes minutes, so what would be compiled is looked at instead."""
    asked: list[tuple[Gpu, set[str]]] = []

    def look(model: str, gpu: Gpu, kernels: Sequence[Kernel], folder: Path, num_workers: int) -> Summary:
        assert folder == tmp_path / "kernels"
        asked.append((gpu, {kernel.label for kernel in kernels}))
        failed = ["one: no"] if len(asked) == 2 else []
        return Summary(model, gpu.name, len(kernels), 0, failed, 0.0, 0.0, str(folder))

    monkeypatch.setattr(command, "fill", look)
    arguments = ["warm", "demo", "--gpu", "gb10", "--kernel-cache", str(tmp_path / "kernels"), "--json"]
    drafts = '{"method": "eagle3", "num_speculative_tokens": 2}'
    with knobs.cache.scope(), knobs.compilation.scope():
        plain = CliRunner().invoke(app, arguments)
        drafted = CliRunner().invoke(app, [*arguments, "--speculative-config", drafts])
    (gpu, without), (_, with_head) = asked
    assert gpu == GB10
    assert len(without) > 30
    assert without < with_head
    assert (plain.exit_code, drafted.exit_code) == (0, 1)
    assert json.loads(plain.stdout)["model"] == "demo"
    assert json.loads(drafted.stdout)["failed"] == ["one: no"]


def test_the_mtp_layer_of_a_preset_needs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def look(model: str, gpu: Gpu, kernels: Sequence[Kernel], folder: Path, num_workers: int) -> Summary:
        counts.append(len(kernels))
        return Summary(model, gpu.name, len(kernels), 0, [], 0.0, 0.0, str(folder))

    monkeypatch.setattr(command, "fill", look)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = ["warm", "qwen3.6-35b-a3b-nvfp4", "--gpu", "gb10", "--kernel-cache", str(tmp_path / "kernels")]
    drafts = '{"method": "mtp", "num_speculative_tokens": %d}'
    with knobs.cache.scope(), knobs.compilation.scope():
        assert CliRunner().invoke(app, [*arguments, "--speculative-config", drafts % 3]).exit_code == 0
        with pytest.raises(BadSetting, match="up to 3 drafts per sequence; ask for 3, not 9"):
            CliRunner().invoke(app, [*arguments, "--speculative-config", drafts % 9], catch_exceptions=False)
    assert len(counts) == 1


def test_without_a_gpu_a_card_must_be_named() -> None:
    code = "import torch; torch.cuda.is_available = lambda: False; from microscale.cli import main; main()"
    command = [sys.executable, "-c", code, "warm", "demo"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "name a card with --gpu" in found.stderr
    assert all(card in found.stderr for card in KNOWN)
