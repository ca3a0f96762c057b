"""``microscale report``: it runs without a GPU, tells nothing of its sender, and becomes rows by one command."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from microscale.cli import load
from microscale.engine.predictions import Phase
from microscale.errors import BadSetting
from microscale.hardware import KNOWN, speeds
from microscale_lab.predict import fit, known_times, whole_models
from microscale_lab.predict.interval import interval
from microscale_lab.report import adopt, card_report
from microscale_lab.report.card_page import page
from microscale_lab.report.telemetry import Telemetry, watched

GB10 = KNOWN["gb10"]
README = Path(__file__).parents[3] / "README.md"


def made_up() -> dict[str, Any]:
    """A report as a GB10's owner would send it: rows at 85 % of what its memory reaches."""

    def row(case: str, num_bytes: int, path: str) -> dict[str, Any]:
        return {
            "op": "moe", "implementation": "triton_w4a16", "case": case, "bytes": num_bytes, "flops": 4 * num_bytes,
            "unit": "bf16", "path": path, "launches": 2, "programs": 1440, "us": round(num_bytes / 205e3 + 8, 2),
        }  # fmt: skip

    model = {"model": "gpt-oss-20b", "precision": "exact", "spread": 0.01}
    return {
        "schema": card_report.SCHEMA,
        "microscale": "0.1.0",
        "date": "2026-12-01",
        "gpu": {
            "name": "NVIDIA GB10", "card": "gb10", "family": "sm120", "capability": "12.1", "num_sms": 48,
            "memory_gib": 119.7, "unified": True,
        },
        "measured": True,
        "software": {"torch": "2.13.0", "triton": "3.8.0", "python": "3.12.3", "system": "Linux aarch64"},
        "doctor": [{"name": "Driver", "status": "ok", "value": "580.95", "fix": None}],
        "kernels": {"executed_on": "gb10", "cases": 312, "failed": []},
        "rows": [
            row("gpt-oss-120b, 1 tokens", 53_003_520, "small batch, direct"),
            row("gpt-oss-120b, 8 tokens", 365_787_648, "small batch, list"),
        ],
        "row_faults": [],
        "models": [
            {**model, "kind": "decode", "batch": 1, "context": 144, "us": 17_000.0,
             "predicted_us": 16_800.0, "low_us": 15_000.0, "high_us": 19_000.0},
            {**model, "kind": "prefill", "batch": 1, "context": 2048, "us": 260_000.0,
             "predicted_us": 200_000.0, "low_us": 150_000.0, "high_us": 240_000.0},
            {"model": "gemma-4-26b-a4b", "missing": "does not fit"},
        ],
        "telemetry": {
            "samples": 2, "sm_mhz": {"least": 2100.0, "median": 2300.0, "most": 2418.0},
            "throttled_samples": {"power cap": 1},
        },
        "seconds": 900.0,
    }  # fmt: skip


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "report.json"
    file.write_text(json.dumps(made_up() | changes))
    return file


# ---- a report that was sent -----------------------------------------------------------------------------------------


def test_a_report_becomes_rows_and_a_line_of_readme(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(README.read_text())
    command = load("report")
    arguments = ["--adopt", str(write(tmp_path)), "--directory", str(tmp_path / "measured"), "--readme", str(readme)]
    command(arguments, standalone_mode=False)
    file = speeds.read(tmp_path / "measured" / "sm120.json", GB10.family)
    assert (file.gpu, file.triton, file.date) == ("gb10", "3.8.0", "2026-12-01")
    assert [row.path for row in file.rows] == ["small batch, direct", "small batch, list"]
    models = whole_models.read(whole_models.file_of("sm120", tmp_path / "measured"))
    assert [(row.case.kind.value, row.us) for row in models.rows] == [("decode", 17_000.0), ("prefill", 260_000.0)]
    assert all(0.3 < row.us / row.kernels_us < 3 for row in models.rows)
    line = "| GB10 (SM 12.1) | **ran**: correct against float32, and timed | itself, 312 cases, 2026-12-01 |"
    assert readme.read_text().count(line) == 1
    assert readme.read_text().replace(line + "\n", "") == README.read_text()
    command(arguments, standalone_mode=False)  # a second time changes nothing
    assert readme.read_text().count("| GB10 (SM 12.1) |") == 1


def test_predictions_are_made_from_the_rows_of_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from_h200 = _predicted_us()
    adopt.adopt(write(tmp_path), None, tmp_path / "measured")
    monkeypatch.setattr(speeds, "MEASURED_DIR", tmp_path / "measured")
    monkeypatch.setattr(whole_models, "DATA", tmp_path / "measured")
    known_times.forget()
    try:
        own = _predicted_us()
    finally:
        monkeypatch.undo()
        known_times.forget()
    assert abs(own / 17_000 - 1) < 0.05
    assert own != from_h200


def _predicted_us() -> float:
    """As the table of predictions is made."""
    case = whole_models.ModelCase("gpt-oss-20b", "exact", Phase.DECODE, 1, 144)
    return interval(fit.kernels(case, GB10), case, GB10).us


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 99}, "schema 99"),
        ({"gpu": made_up()["gpu"] | {"card": None}}, "no row in hardware/cards"),
        ({"measured": False}, "made without a GPU"),
        ({"kernels": {"cases": 3, "failed": [{"op": "moe"}]}}, "1 kernels were wrong"),
        ({"rows": [made_up()["rows"][0] | {"us": 1.0}]}, "faster than gb10 can be"),
        ({"rows": [{"op": "moe"}]}, "lacks"),
        ({"kernels": None}, "is no report"),
    ],
)
def test_a_report_that_cannot_be_true_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=message):
        adopt.adopt(write(tmp_path, **changes), None, tmp_path / "measured")
    assert not (tmp_path / "measured").exists()


def test_the_page_shows_what_was_predicted_beside_what_was_measured() -> None:
    text = page(made_up())
    assert "| gpt-oss-20b | exact | decode, 1 x 144 | 58.8 | 59.5 | 52.6 to 66.7 | yes |" in text
    assert "| gpt-oss-20b | exact | prefill 2048 | 7876.9 | 10240.0 | 8533.3 to 13653.3 | no |" in text
    assert "throttled, of 2 samples: power cap 1" in text
    assert "312 cases executed on gb10: all as float32 says" in text


# ---- nothing of the sender ------------------------------------------------------------------------------------------


def test_names_paths_and_numbers_are_taken_out() -> None:
    dirty = {
        "a": ["3.11 at /home/anna/.venv/bin/python", "GPU-1b2c3d4e-0000-1111-2222-333344445555 ok"],
        "b": {"c": "spark-7 says 192.168.0.17 of anna", "d": 4.5, "e": None},
        "f": "4.4 TB/s, tg128 and/or pp512, SM 12.1/12.0",
    }
    cleaned = card_report.clean(dirty, ["spark-7", "anna"])
    text = json.dumps(cleaned)
    for word in ("anna", "spark-7", "192.168", "/home", "1b2c3d4e"):
        assert word not in text
    assert cleaned["f"] == dirty["f"]
    assert cleaned["b"]["d"] == 4.5


# ---- a run without a GPU --------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_report_without_a_gpu(tmp_path: Path) -> None:
    """Kernels of one op, executed on the CPU; the machine; nothing timed; both files."""
    output = tmp_path / "report.json"
    load("report")(["--gpu", "gb10", "--op", "small", "-o", str(output)], standalone_mode=False)
    found = json.loads(output.read_text())
    assert found["kernels"]["cases"] > 3
    assert found["kernels"]["failed"] == []
    assert (found["measured"], found["rows"], found["models"]) == (False, [], [])
    assert str(Path.home()) not in output.read_text()
    assert "/site-packages" not in output.read_text()
    assert "Nothing was timed" in output.with_suffix(".md").read_text()
    with pytest.raises(BadSetting, match="made without a GPU"):
        adopt.read_report(output)


def test_a_machine_without_a_gpu_must_name_a_card() -> None:
    with pytest.raises(BadSetting, match="--gpu NAME"):
        load("report")([], standalone_mode=False)


# ---- clocks and power -----------------------------------------------------------------------------------------------


def test_clocks_power_and_throttling_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '2400, 8533, 61.5, 66, 0x0000000000000024'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with watched() as seen:
        pass
    said = seen.to_json()
    assert said["samples"] >= 1
    assert said["power_w"] == {"least": 61.5, "median": 61.5, "most": 61.5}
    assert set(said["throttled_samples"]) == {"power cap", "thermal (software)"}


def test_what_a_driver_does_not_know_is_left_out() -> None:
    seen = Telemetry()
    seen.add("[N/A], 8533, 61.5, 66, 0x0")
    assert seen.to_json() == {"samples": 0, "throttled_samples": {}}
