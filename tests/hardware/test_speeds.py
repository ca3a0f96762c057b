"""Measured speeds: an exact row decides, near ones help, far ones do not, and damaged files are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from microscale.errors import BadSetting
from microscale.hardware import FAMILY_OF_SM, KNOWN, speeds
from microscale.hardware.speeds import Measured, SpeedFile

H200 = KNOWN["h200"]
ROWS = (
    Measured("moe", "x", "small", 48_000_000, 0, "bf16", "one", 1, 99, 20.0),  # floor 10 us: 0.5
    Measured("moe", "x", "large", 480_000_000, 0, "bf16", "one", 1, 99, 125.0),  # floor 100 us: 0.8
)
FILE = SpeedFile("sm90", "h200", "2.11", "3.6", "2026-11-15", ROWS)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "sm90.json"
    file.write_text(json.dumps(asdict(FILE)))
    monkeypatch.setattr(speeds, "MEASURED_DIR", tmp_path)
    speeds._index.cache_clear()
    yield file
    speeds._index.cache_clear()


def test_rows_decide_near_them_and_nowhere_else(measured: Path) -> None:
    def at(num_bytes: float) -> float | None:
        return speeds.efficiency(H200.family, "moe", "x", num_bytes, 0)

    assert at(48e6) == pytest.approx(0.5, rel=1e-3)
    assert at(480e6) == pytest.approx(0.8, rel=1e-3)
    assert 0.5 < at(150e6) < 0.8  # type: ignore[operator]
    assert at(1e6) is None
    assert speeds.efficiency(H200.family, "moe", "y", 48e6, 0) is None
    assert speeds.efficiency(KNOWN["a100"].family, "moe", "x", 48e6, 0) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("date"), "missing required field `date`"),
        (lambda data: data["rows"][0].update(extra=1), "unknown or missing"),
        (lambda data: data.update(family="sm80"), "family 'sm80'"),
        (lambda data: data.update(gpu="a100"), "not on a known card of family"),
        (lambda data: data["rows"][0].update(us=0), "is not a measurement"),
        (lambda data: data["rows"][0].update(us=1.0), "faster than NVIDIA H200 can be"),
    ],
)
def test_damaged_files_are_refused(measured: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    data = json.loads(measured.read_text())
    change(data)
    measured.write_text(json.dumps(data))
    with pytest.raises(BadSetting, match=message):
        speeds.read(measured, H200.family)


def test_every_shipped_file_is_valid() -> None:
    families = {family.name: family for family in FAMILY_OF_SM.values()}
    files = list(speeds.MEASURED_DIR.glob("*.json"))
    assert files
    for file in files:
        assert speeds.read(file, families[file.stem]).rows
