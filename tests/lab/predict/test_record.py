"""Benchmarks become measured speeds: bytes, operations and time come back, and older rows of other cases stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from microscale import hardware
from microscale.errors import Unsupported
from microscale.hardware import speeds
from microscale.hardware.speeds import Measured, SpeedFile
from microscale_lab.kernel_bench.rows import StartedKernels, row
from microscale_lab.kernel_bench.timing import Ceilings
from microscale_lab.predict import known_times
from microscale_lab.predict.kernel_fit import KernelWork
from microscale_lab.predict.rates import MMA_SYNC, library_rates, stand_in
from microscale_lab.predict.record import DATA, merge, played_files, read_played, record, to_json

H200 = replace(hardware.known("h200"), memory_bytes=int(139.8 * hardware.GIB))


def test_rows_are_recorded_and_older_cases_stay(tmp_path: Path) -> None:
    ceilings = Ceilings(4500, 800)
    first = row("dense", "qkv, 1 token", "triton_bf16", 9.0, 29_500_000, 29_500_000, ceilings, 1e-3)
    second = row("dense", "qkv, 4096 tokens", "triton_mxfp8_a8", 200.0, 57_000_000, 121e9, ceilings, 1e-3, unit="fp8")
    record([first, second], H200, tmp_path)
    first = replace(first, launched=StartedKernels("small batch", 1, 320))
    file = record([replace(first, us=8.0, gbs=29_500_000 / 8e3, tflops=29.5 / 8)], H200, tmp_path)
    rows = {entry.case: entry for entry in speeds.read(file, H200.family).rows}
    assert rows["qkv, 1 token"].us == 8.0
    assert (rows["qkv, 1 token"].path, rows["qkv, 1 token"].launches, rows["qkv, 1 token"].programs) == (
        "small batch",
        1,
        320,
    )
    assert rows["qkv, 1 token"].bytes == pytest.approx(29_500_000, abs=2)
    assert rows["qkv, 4096 tokens"].unit == "fp8"
    assert rows["qkv, 4096 tokens"].flops == pytest.approx(121e9, rel=1e-6)


def test_new_rows_replace_old_ones_of_the_same_case() -> None:
    small, large = (
        Measured("moe", "x", name, size, 0, "bf16", "one", 1, 99, us)
        for name, size, us in (("small", 48_000_000, 20.0), ("large", 480_000_000, 125.0))
    )
    old = SpeedFile("sm90", "h200", "2.11", "3.6", "2026-11-15", (small, large))
    merged = merge(old, SpeedFile("sm90", "h200", "2.12", "3.7", "2026-12-01", (replace(small, us=16.0),)))
    assert [(row.case, row.us) for row in merged.rows] == [("small", 16.0), ("large", 125.0)]
    assert merged.torch == "2.12"
    assert merge(None, old) == old


def test_shipped_files_are_as_they_would_be_written() -> None:
    families = {family.name: family for family in hardware.FAMILY_OF_SM.values()}
    for file in speeds.MEASURED_DIR.glob("*.json"):
        assert file.read_text() == to_json(speeds.read(file, families[file.stem]))
    assert played_files()
    for file in (DATA / "played").glob("*.json"):
        assert file.read_text() == to_json(read_played(file)[0], "h200")


def test_an_unknown_card_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="not in the table"):
        record([], replace(H200, name="NVIDIA H300"), tmp_path)


def test_rows_of_another_card_s_kernels_serve_predictions_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GB10's grouped kernel on an H200: predictions for cards that run it use its rows, the H200's do not."""
    work = KernelWork(400_000_000, 100_000_000_000)
    measured = row("moe", "64 tokens", "triton_w4a16", 900.0, work.bytes, work.flops, Ceilings(4500, 800), 1e-3)
    ran = replace(measured, launched=StartedKernels("grouped, made up", 2, 320))
    file = record([ran], H200, tmp_path, played="gb10")
    assert file == tmp_path / "played" / "sm120.json"
    held, rates = read_played(file)
    assert held.gpu == "gb10"
    assert rates == stand_in("h200", "gb10")
    assert file.read_text() == to_json(held, "h200")

    def predicted(gpu: hardware.Gpu) -> float | None:
        found = known_times.find(gpu, "moe", "triton_w4a16", "grouped, made up", work)
        return found and found[0].us

    monkeypatch.setattr(speeds, "MEASURED_DIR", tmp_path)
    monkeypatch.setattr("microscale_lab.predict.record.DATA", tmp_path)
    known_times.forget()
    try:
        assert predicted(stand_in("h200", "gb10")) == pytest.approx(900, rel=0.1)
        assert (predicted(hardware.known("gb10")) or 0) > 1500  # a twentieth of the bandwidth
        assert predicted(hardware.known("a100")) is not None
        assert predicted(hardware.known("h200")) is None
        assert speeds.efficiency(hardware.known("gb10").family, "moe", "triton_w4a16", work.bytes, work.flops) is None
    finally:
        monkeypatch.undo()
        known_times.forget()
    file.write_text(file.read_text().replace('"h200"', '"h300"'))
    with pytest.raises(Unsupported, match="h300"):
        read_played(file)


def test_torchs_products_on_a_stand_in_are_the_gpus_own() -> None:
    played = stand_in("h200", "gb10")
    assert played.peak.bf16 == pytest.approx(MMA_SYNC * H200.peak.bf16)
    assert library_rates(played).peak == H200.peak
    assert library_rates(H200) == H200
