"""Files of measured tiles: they come back as written, measured tiles come first, and what is wrong is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from microscale.errors import BadSetting
from microscale.hardware import FAMILY_OF_SM, GENERIC, known
from microscale.hardware.cards import SM90
from microscale.hardware.tiles import attention, dense, experts, gemm, thresholds, tuned
from microscale.hardware.tiles.gemm import GemmCase, GemmPath, GemmTile, choose, possible
from microscale.hardware.tiles.tuned import Kernels, Measurement, Section, TunedTile

SECTIONS: tuple[Section[Any, Any], ...] = (
    gemm.SECTION, attention.SECTION, attention.SPLIT_SECTION, experts.SECTION, dense.SECTION, thresholds.SECTION,
)  # fmt: skip
MEASURED = Measurement("NVIDIA H200", "2.11.0", "3.6.0", "2026-11-15", "one layer", 10.5)
EXAMPLE = [
    TunedTile(GemmCase(GemmPath.W8A16, 16), GemmTile(16, 128, 64, 4, 4), MEASURED),
    TunedTile(GemmCase(GemmPath.W8A16, 1 << 20), GemmTile(64, 128, 64, 4, 3), MEASURED),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where files are read from meanwhile."""
    monkeypatch.setattr(tuned, "TUNED_DIR", tmp_path)
    tuned.forget()
    yield tmp_path
    tuned.forget()


def test_a_file_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "sm90.json"
    tuned.write(file, SM90, {gemm.SECTION: EXAMPLE})
    assert list(tuned.read(file, gemm.SECTION, SM90).values()) == EXAMPLE
    # Another section leaves it alone.
    case = attention.AttentionCase(attention.AttentionWork.DECODE, 64, attention.Kv.BF16)
    row = TunedTile(case, attention.AttentionTile(16, 64, 4, 3, None, 64), MEASURED)
    tuned.write(file, SM90, {attention.SECTION: [row]})
    assert list(tuned.read(file, gemm.SECTION, SM90).values()) == EXAMPLE
    assert tuned.read(file, attention.SECTION, SM90) == {case: row}


def test_measured_tiles_come_first(folder: Path) -> None:
    gpu = known("h200")
    assert gemm.measured_tile(GemmPath.W8A16, gpu, 10 * 128, 128) is None
    tuned.write(folder / "sm90.json", SM90, {gemm.SECTION: EXAMPLE})
    tuned.forget()
    assert choose(GemmPath.W8A16, gpu, 10 * 128, 128, 2880) == GemmTile(16, 128, 64, 4, 4)
    assert choose(GemmPath.W8A16, gpu, 100 * 128, 128, 2880) == GemmTile(64, 128, 64, 4, 3)
    assert gemm.measured_tile(GemmPath.W4A16, gpu, 10 * 128, 128) is None
    assert list(possible(GemmPath.W8A16, gpu)) == [row.tile for row in EXAMPLE]


def test_a_trial_ends(folder: Path) -> None:
    gpu, case = known("h200"), attention.AttentionCase(attention.AttentionWork.DECODE, 64, attention.Kv.BF16)
    before, tried = attention.choose(case, gpu), attention.AttentionTile(16, 32, 8, 2)
    assert before != tried
    with tuned.trial(attention.SECTION, gpu.family, case, tried):
        assert attention.choose(case, gpu) == tried
    assert attention.choose(case, gpu) == before


def row_of(**changes: Any) -> dict[str, Any]:
    """A good row of a grouped GEMM as JSON, with some parts replaced."""
    row: dict[str, Any] = {
        "key": {"path": "w8a16", "up_to": 1},
        "tile": {"block_m": 16, "block_n": 128, "block_k": 64, "warps": 4, "stages": 4},
        "measured": {"gpu": "x", "torch": "x", "triton": "x", "date": "x", "run": "x", "us": None},
    }
    return row | {name: {**row[name], **part} if isinstance(part, dict) else part for name, part in changes.items()}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"family": "sm80"}, "measured for family 'sm80'"),
        ({"colour": []}, "unknown keys colour"),
        ({"grouped_gemm": {}}, "must hold a list"),
        ({"grouped_gemm": [7]}, r"Expected `object`, got `int`"),
        ({"grouped_gemm": [row_of() | {"note": 1}]}, "unknown or missing"),
        ({"grouped_gemm": [{name: row_of()[name] for name in ("key", "tile")}]}, "missing required field `measured`"),
        ({"grouped_gemm": [row_of(key={"path": "w2a16"})]}, r"Invalid enum value 'w2a16' - at `\$.key.path`"),
        ({"grouped_gemm": [row_of(key={"rows": 1})]}, "unknown or missing"),
        ({"grouped_gemm": [row_of(key=7)]}, r"Expected `object`, got `int` - at `\$.key`"),
        ({"grouped_gemm": [row_of(tile={"stages": "4"})]}, "Expected `int`, got `str`"),
        ({"grouped_gemm": [row_of(tile={"stages": True})]}, "Expected `int`, got `bool`"),
        ({"grouped_gemm": [row_of(tile={"stages": None})]}, "Expected `int`, got `null`"),
        ({"grouped_gemm": [row_of(tile={"stages": 40})]}, "bytes of shared memory"),
        ({"grouped_gemm": [row_of(measured={"us": "fast"})]}, r"Expected `float \| null`, got `str`"),
        ({"grouped_gemm": [row_of(measured={"who": "me"})]}, "unknown or missing"),
        ({"grouped_gemm": [row_of(), row_of()]}, "two tiles for path w8a16, up_to 1"),
        ({"grouped_gemm": [row_of(key={"up_to": 9}), row_of()]}, "ascending up_to"),
    ],
)
def test_a_faulty_file_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = tmp_path / "sm90.json"
    file.write_text(json.dumps({"family": "sm90", "grouped_gemm": [row_of()]}))
    assert len(tuned.read(file, gemm.SECTION, SM90)) == 1
    file.write_text(json.dumps({"family": "sm90", "grouped_gemm": [row_of()]} | changes))
    with pytest.raises(BadSetting, match=message):
        tuned.read(file, gemm.SECTION, SM90)


CASE = attention.AttentionCase(attention.AttentionWork.PREFILL, 512, attention.Kv.BF16)
DENSE_CASE = dense.DenseCase(dense.DenseFormat.BF16, 8, dense.Size.MANY)
LIST = experts.ExpertCase(experts.ExpertGemm.DOWN_LIST, 4, 64, 1, 1.0)


@pytest.mark.parametrize(
    "section, key, tile, message",
    [
        (attention.SECTION, CASE, attention.AttentionTile(128, 128, 8, 4), "bytes of shared memory"),
        (
            attention.SECTION,
            attention.AttentionCase(CASE.work, 96, CASE.kv),
            attention.AttentionTile(16, 16, 4, 2),
            "heads of 96",
        ),
        (dense.SECTION, DENSE_CASE, dense.DenseTile(16, 4, 4, 1, 2, 168), "serves 16 tokens"),
        (dense.SECTION, DENSE_CASE, dense.DenseTile(8, 4, 4, 1, 2, 300), "300 registers"),
        (dense.SECTION, DENSE_CASE, dense.DenseTile(8, 3, 4, 1, 2, 168), "evenly among its warps"),
        (experts.SECTION, LIST, experts.ExpertTile(4, 4, 1, 5, 300), "300 registers"),
        (experts.SECTION, LIST, experts.ExpertTile(4, 3, 1, 5), "evenly among its warps"),
        (
            thresholds.SECTION,
            thresholds.Key(thresholds.ThresholdName.FP8_PAIRS),
            thresholds.Value(0),
            "must be positive",
        ),
    ],
)
def test_a_tile_that_cannot_run_is_refused(
    tmp_path: Path, section: Section[Any, Any], key: Any, tile: Any, message: str
) -> None:
    file = tmp_path / "sm90.json"
    tuned.write(file, SM90, {section: [TunedTile(key, tile, MEASURED)]})
    with pytest.raises(BadSetting, match=message):
        tuned.read(file, section, SM90)


def test_damaged_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sm90.json"
    file.write_text("{")
    with pytest.raises(BadSetting, match="microscale tune"):
        tuned.read(file, gemm.SECTION, SM90)


def test_every_shipped_file_is_valid() -> None:
    assert {section.name for section in SECTIONS} == set(Kernels)
    families = {family.name: family for family in (*FAMILY_OF_SM.values(), GENERIC)}
    files = list(tuned.TUNED_DIR.glob("*.json"))
    assert files
    for file in files:
        for section in SECTIONS:
            for row in tuned.read(file, section, families[file.stem]).values():
                said = row.measured
                assert all((said.gpu, said.torch, said.triton, said.date, said.run)), row


def test_every_row_of_a_shipped_file_is_reached() -> None:
    """The whole of H200's rows is chosen for some shape; a row that none reaches is dead."""
    h200 = known("h200")
    for key, row in tuned.measured(experts.SECTION, SM90).items():
        row_tiles = int(min(key.up_to, 40) * h200.num_sms)
        assert experts.find(key.gemm, key.bits, key.tokens, key.top_k_from, row_tiles, h200) == (key, row.tile)
