"""``bench sweep``: which rows, in which order, what a second call leaves out, and how rows are kept."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from microscale import hardware
from microscale.bench import model as whole
from microscale.cli import load
from microscale.engine.predictions import Phase
from microscale.errors import BadSetting, Unsupported
from microscale_lab.predict import sweep, whole_models
from microscale_lab.predict.whole_models import ModelCase

pytestmark = pytest.mark.nightly

H200 = hardware.known("h200")
ROW = whole.BenchRow("tg32", 8, 128, 1500.0, 2000.0, 1480.0, (1490.0, 1500.0, 1520.0))


def test_the_rows_that_tell_most_come_first() -> None:
    found = sweep.cases("gpt-oss-20b", "exact")
    assert len(found) == len(set(found)) > 20
    first = {(case.kind, case.batch) for case in found[:6]}
    assert {("tg", 1), ("tg", 8), ("pp", 1)} <= first
    assert all(case.batch * case.depth <= sweep.MOST_CACHED for case in found)
    assert {case.tokens for case in found if case.kind == "pp"} == {128, 512, 1024, 2048, 4096, 8192}
    assert {case.batch for case in found if case.kind == "tg"} == {1, 2, 4, 8, 16, 32, 64, 128, 256, 512}


def test_a_row_keeps_the_time_of_a_step_or_of_a_prompt() -> None:
    row = sweep.row_of("gpt-oss-120b", "exact", ROW)
    assert row.case == ModelCase("gpt-oss-120b", "exact", Phase.DECODE, 8, 144)
    assert row.us == pytest.approx(8 / 1500 * 1e6, rel=1e-4)
    assert row.spread == pytest.approx(0.02)
    prompt = sweep.row_of("gpt-oss-120b", "fast", replace(ROW, test="pp2048", batch=1, depth=0, tok_s=40_960.0))
    assert (prompt.case.kind, prompt.case.context, prompt.us) == (Phase.PREFILL, 2048, 50_000.0)


def test_a_sweep_goes_on_where_it_stopped() -> None:
    """The tiny model, on a CPU: rows come, are not measured again, and none comes once time is up."""
    said: list[str] = []
    rows = sweep.run("gpt-oss-tiny", ("exact",), (), time.monotonic() + 300, said.append, device="cpu")
    found = [next(rows), next(rows)]
    rows.close()
    assert len({row.case for row in found}) == 2
    assert all(row.us > 0 and row.case.model == "gpt-oss-tiny" for row in found)
    more = sweep.run("gpt-oss-tiny", ("exact",), found, time.monotonic() + 300, device="cpu")
    assert next(more).case not in {row.case for row in found}
    more.close()
    assert list(sweep.run("gpt-oss-tiny", ("exact",), found, time.monotonic() - 1, device="cpu")) == []
    assert said[0].startswith("gpt-oss-tiny exact: ")


def test_rows_survive_the_file(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    assert sweep.read(file) == []
    rows = [sweep.row_of("gpt-oss-20b", "exact", ROW)]
    sweep.write(file, H200, rows)
    assert sweep.read(file) == rows


def test_rows_are_recorded_with_the_sums_of_today_in_place_of_older_ones(tmp_path: Path) -> None:
    rows = [sweep.row_of("gpt-oss-20b", "exact", ROW)]
    sweep.record(rows, H200, "a test", tmp_path)
    again = [replace(rows[0], us=5000.0), sweep.row_of("gpt-oss-20b", "fast", ROW)]
    file = whole_models.read(sweep.record(again, H200, "a test", tmp_path))
    assert [(row.case.precision, row.us) for row in file.rows] == [("exact", 5000.0), ("fast", again[1].us)]
    assert all(1000 < row.kernels_us < 10_000 for row in file.rows)
    with pytest.raises(Unsupported, match="not in the table"):
        sweep.record(rows, replace(H200, name="NVIDIA H300"), "a test", tmp_path)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(BadSetting, match="--precision other"):
        load("bench")(["sweep", "--precision", "other"], standalone_mode=False)
