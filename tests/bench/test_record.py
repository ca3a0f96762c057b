"""Benchmarks become measured speeds: bytes, operations and time come back, and older rows of other cases stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from microscale import hardware
from microscale.bench.record import record
from microscale.bench.rows import Launched, row
from microscale.bench.timing import Ceilings
from microscale.errors import Unsupported
from microscale.hardware import speeds

H200 = replace(hardware.known("h200"), memory_bytes=int(139.8 * hardware.GIB))


def test_rows_are_recorded_and_older_cases_stay(tmp_path: Path) -> None:
    ceilings = Ceilings(4500, 800)
    first = row("dense", "qkv, 1 token", "triton_bf16", 9.0, 29_500_000, 29_500_000, ceilings, 1e-3)
    second = row("dense", "qkv, 4096 tokens", "triton_mxfp8_a8", 200.0, 57_000_000, 121e9, ceilings, 1e-3, unit="fp8")
    record([first, second], H200, tmp_path)
    first = replace(first, launched=Launched("small batch", 1, 320))
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


def test_an_unknown_card_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="not in the table"):
        record([], replace(H200, name="NVIDIA H300"), tmp_path)
