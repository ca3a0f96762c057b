"""Tuning without a GPU: what is measured, what is kept, what is written. The measuring itself runs on a card."""

from __future__ import annotations

from pathlib import Path

import pytest

from microscale.bench import tune as module
from microscale.bench.tune import Shape, make_experts, make_layer, runnable, tune
from microscale.errors import MicroscaleError, Unsupported
from microscale.hardware import cpu, known, tiles
from microscale.hardware.families import SM90
from microscale.hardware.tiles import BUSY_PAIRS, GemmPath, Tile
from microscale.kernels.moe import reference
from microscale.kernels.moe.packed import pack_experts

H200 = known("h200")


@pytest.fixture
def _fake_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card on which the tile nearest to the share is the fastest."""
    monkeypatch.setattr(module, "make_experts", lambda shape, path: None)
    monkeypatch.setattr(module, "pack_experts", lambda experts, gate: None)
    monkeypatch.setattr(module, "make_layer", lambda experts, packed, share: share)

    def measure(share: int, path: GemmPath, gpu: object, tile: Tile, time_us: object) -> float:
        return abs(tile.block_m - min(share, 128)) + tile.stages + 10 * (tile.block_n == 64) + tile.warps

    monkeypatch.setattr(module, "_measure", measure)


@pytest.mark.usefixtures("_fake_card")
def test_the_fastest_tile_of_each_share_is_written(tmp_path: Path) -> None:
    file = tune(H200, tmp_path, paths=[GemmPath.W8A16], shares=(8, 64, 192, 768))
    assert file.name == "sm90.json"
    found = tiles.read(file, SM90)
    assert found.gpu == "NVIDIA H200"
    rows = found.paths[GemmPath.W8A16]
    assert [(row.up_to, row.tile.block_m) for row in rows] == [(23, 16), (111, 64), (BUSY_PAIRS, 128)]
    assert {row.tile.stages for row in rows} == {2}


@pytest.mark.usefixtures("_fake_card")
def test_paths_that_are_not_measured_stay(tmp_path: Path) -> None:
    tune(H200, tmp_path, paths=[GemmPath.W8A16], shares=(8,))
    file = tune(H200, tmp_path, paths=[GemmPath.W4A16], shares=(64,))
    assert set(tiles.read(file, SM90).paths) == {GemmPath.W4A16, GemmPath.W8A16}


def test_a_card_on_which_nothing_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "make_experts", lambda shape, path: None)
    monkeypatch.setattr(module, "pack_experts", lambda experts, gate: None)
    monkeypatch.setattr(module, "make_layer", lambda experts, packed, share: share)
    monkeypatch.setattr(module, "_measure", lambda *args: float("inf"))
    with pytest.raises(MicroscaleError, match="No tile of w8a16 gave a right answer"):
        tune(H200, tmp_path, paths=[GemmPath.W8A16], shares=(8,))
    assert not list(tmp_path.iterdir())


def test_a_machine_without_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="needs a GPU"):
        tune(cpu(), tmp_path)


def test_block_scaled_paths_need_the_instruction() -> None:
    assert runnable(H200) == [GemmPath.W4A16_WGMMA, GemmPath.W4A8_WGMMA, GemmPath.W8A16]
    assert runnable(known("gb10")) == [path for path in GemmPath if not path.wgmma]


@pytest.mark.parametrize("path", list(GemmPath))
def test_the_layer_that_is_timed_has_ordinary_numbers(path: GemmPath) -> None:
    shape = Shape(num_experts=4, hidden=256, intermediate=256)
    experts = make_experts(shape, path, device="cpu")
    layer = make_layer(experts, pack_experts(experts, module.GATE), share=4)
    y = reference.moe(layer.x, layer.weights, layer.routing, module.GATE)
    assert layer.x.shape == y.shape == (4, 256)
    assert 0.05 < float(y.square().mean().sqrt()) < 50
