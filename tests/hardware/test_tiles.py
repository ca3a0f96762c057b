"""Tiles: nothing that does not fit can be chosen, and tuned files are read strictly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from microscale.errors import BadSetting
from microscale.hardware import FAMILY_OF_SM, GENERIC, KNOWN, known, tiles
from microscale.hardware.families import SM90, SM120
from microscale.hardware.tiles import GemmPath, Tile, TunedFile, TunedRow, candidates, choose, possible

CARDS = [*KNOWN.values()]
SIZES = [
    (pairs, experts, rows) for pairs in (1, 4, 65, 300, 2000, 40000) for experts in (1, 32, 128) for rows in (704, 2880)
]


@pytest.mark.parametrize("path", list(GemmPath))
@pytest.mark.parametrize("gpu", CARDS, ids=list(KNOWN))
def test_all_that_may_be_chosen_fits(gpu: Any, path: GemmPath) -> None:
    allowed = set(possible(path, gpu))
    assert allowed
    for tile in allowed | set(candidates(path, gpu)):
        assert tile.misfit(path, gpu.family) is None
        assert tile.shared_bytes(path, gpu.family) <= gpu.shared_per_block
        assert tile.accumulators() * tile.warps * 32 < gpu.registers_per_sm
    for pairs, experts, rows in SIZES:
        assert choose(path, gpu, pairs, experts, rows).tile in allowed


def test_two_programs_share_an_sm_where_they_can() -> None:
    tile = choose(GemmPath.W4A8, known("gb10"), 4096, 128, 2880).tile
    assert 2 * (tile.shared_bytes(GemmPath.W4A8, SM120) + 1024) <= SM120.shared_per_sm


def test_tiles_grow_with_the_share_of_an_expert() -> None:
    shares = (128, 4000, 8000, 40000)
    sizes = [choose(GemmPath.W4A16, known("a100"), pairs, 128, 2880).tile.block_m for pairs in shares]
    assert sizes == [16, 32, 64, 64]
    sizes = [choose(GemmPath.W4A8, known("rtx5090"), pairs, 128, 2880).tile.block_m for pairs in shares]
    assert sizes == [16, 32, 64, 128]


def test_few_programs_make_smaller_tiles() -> None:
    # One expert, 22 blocks of rows: two tiles of 64 would occupy 44 of 108 SMs.
    assert choose(GemmPath.W4A16, known("a100"), 128, 1, 2880).tile.block_m == 16


def test_a_tile_that_is_too_large_says_why() -> None:
    tile = Tile(128, 128, 128, 8, 4)
    reason = tile.misfit(GemmPath.W8A8, SM120)
    assert reason is not None
    assert "shared memory, family sm120 offers 101376" in reason
    assert tile.misfit(GemmPath.W8A8, SM90) is None
    assert "steps of 64" in str(Tile(16, 128, 128, 4, 2).misfit(GemmPath.W4A16, SM90))
    assert "accumulators" in str(Tile(128, 128, 64, 2, 2).misfit(GemmPath.W4A16, SM90))


def example() -> TunedFile:
    rows = (TunedRow(16, Tile(16, 128, 64, 4, 4), 10.5), TunedRow(1 << 30, Tile(64, 128, 64, 4, 3), 99.0))
    return TunedFile("sm90", "NVIDIA H200", "2.11.0", "3.6.0", "2026-11-15", {GemmPath.W8A16: rows})


def write(tmp_path: Path, **changes: Any) -> Path:
    file = tmp_path / "sm90.json"
    file.write_text(json.dumps(json.loads(example().to_json()) | changes))
    return file


def test_a_tuned_file_comes_back(tmp_path: Path) -> None:
    assert tiles.read(write(tmp_path), SM90) == example()


def test_measured_tiles_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setattr(tiles, "TUNED_DIR", tmp_path)
    tiles.tuned.cache_clear()
    try:
        gpu = known("h200")
        choice = choose(GemmPath.W8A16, gpu, 10 * 128, 128, 2880)
        assert choice.tuned
        assert choice.tile == Tile(16, 128, 64, 4, 4)
        assert choose(GemmPath.W8A16, gpu, 100 * 128, 128, 2880).tile == Tile(64, 128, 64, 4, 3)
        assert not choose(GemmPath.W4A16, gpu, 10 * 128, 128, 2880).tuned
        assert list(possible(GemmPath.W8A16, gpu)) == [row.tile for row in example().paths[GemmPath.W8A16]]
    finally:
        tiles.tuned.cache_clear()


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        (Tile(256, 64, 64, 4, 4), "has 64 rows and 4 warps"),
        (Tile(256, 128, 64, 8, 3), "has 3 stages"),
        (Tile(256, 128, 64, 8, 8), "needs .* bytes of shared memory"),
        (Tile(256, 128, 64, 8, 4), None),
    ],
)
def test_resident_tiles_are_what_the_kernel_can_run(tile: Tile, reason: str | None) -> None:
    found = tile.misfit(GemmPath.W4A16_WGMMA, known("h200").family)
    assert found is None if reason is None else re.search(reason, found or "")


BAD_TILE = {"block_m": 128, "block_n": 128, "block_k": 64, "warps": 8, "stages": 4}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"gpu": 7}, "wrong type"),
        ({"family": "sm80"}, "measured for family 'sm80'"),
        ({"colour": "red"}, "unknown keys colour"),
        ({"paths": {"w2a16": []}}, "known are w4a16"),
        ({"paths": {"w8a16": []}}, "ascending up_to"),
        ({"paths": {"w8a16": [{"up_to": 1, "microseconds": 1}]}}, "lacks the key 'tile'"),
        ({"paths": {"w8a16": [{"up_to": 1, "microseconds": 1, "tile": {"block_m": 16}}]}}, "lacks the key 'block_n'"),
        (
            {"paths": {"w8a16": [{"up_to": 1, "microseconds": 1, "tile": BAD_TILE | {"stages": 10}}]}},
            "bytes of shared memory",
        ),
    ],
)
def test_a_faulty_tuned_file_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        tiles.read(write(tmp_path, **changes), SM90)


def test_damaged_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sm90.json"
    file.write_text("{")
    with pytest.raises(BadSetting, match="microscale tune"):
        tiles.read(file, SM90)


def test_every_shipped_file_is_valid() -> None:
    families = {family.name: family for family in (*FAMILY_OF_SM.values(), GENERIC)}
    for file in tiles.TUNED_DIR.glob("*.json"):
        assert tiles.read(file, families[file.stem]).paths
