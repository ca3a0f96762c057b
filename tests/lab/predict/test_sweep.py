"""``bench sweep``: which rows, in which order, what a second call leaves out, and how rows are kept."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from microscale import hardware
from microscale.bench import model as whole
from microscale.cli import load
from microscale.engine.predictions import Kind
from microscale.errors import BadSetting, Unsupported
from microscale_lab.predict import stand_in, sweep, whole_models
from microscale_lab.predict.fewer_sms import fewer_sms
from microscale_lab.predict.rates import STREAMED
from microscale_lab.predict.rates import reach_of as reach
from microscale_lab.predict.rates import stand_in as card_record
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
    assert row.case == ModelCase("gpt-oss-120b", "exact", Kind.DECODE, 8, 144)
    assert row.us == pytest.approx(8 / 1500 * 1e6, rel=1e-4)
    assert row.spread == pytest.approx(0.02)
    prompt = sweep.row_of("gpt-oss-120b", "fast", replace(ROW, test="pp2048", batch=1, depth=0, tok_s=40_960.0))
    assert (prompt.case.kind, prompt.case.context, prompt.us) == (Kind.PREFILL, 2048, 50_000.0)


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


def test_rows_of_a_stand_in_are_held_against_the_whole_card_s_fit(tmp_path: Path) -> None:
    """48 SMs with an H200's memory: few tokens take about as long, a prompt about 132 / 48 as long and more."""
    few, whole_card = card_record("h200", "gb10", 48), card_record("h200", None)
    assert (few.num_sms, few.bandwidth_gbs, few.family.name) == (48, 4800, "sm120")
    assert reach(few) == reach(H200)
    half = card_record("h200", "gb10", 48, read_gbs=reach(H200).gbs / 2)
    assert reach(half).gbs == pytest.approx(reach(H200).gbs / 2)
    third = card_record("h200", "gb10", 48, read_gbs=reach(H200).gbs / 2, streamed_gbs=reach(H200).gbs / 3 * STREAMED)
    assert reach(third).gbs == pytest.approx(reach(H200).gbs / 3)
    assert card_record("h200", "gb10", 48, reach(H200).gbs / 2, streamed_gbs=1e9) == half
    gb10 = hardware.known("gb10")
    step, prompt = (
        sweep.SweepRow(ModelCase("gpt-oss-20b", "exact", kind, 1, context), 1.0, 0.0)
        for kind, context in ((Kind.DECODE, 144), (Kind.PREFILL, 2048))
    )
    slower = [
        stand_in.held(row, gb10, few).predicted_us / stand_in.held(row, H200, whole_card).predicted_us
        for row in (step, prompt)
    ]
    assert 1.0 < slower[0] < 1.6
    assert 2.0 < slower[1] < 6.0
    file = tmp_path / "sweep.json"
    made = [replace(row, us=1.05 * stand_in.held(row, gb10, few).predicted_us) for row in (step, prompt)]
    sweep.write(file, H200, made, sweep.PlayedAs("gb10", 48))
    lines = stand_in.report(file)
    assert "median error 4.8%, within 12 %: 100%" in lines[-1]
    sweep.write(file, H200, made, sweep.PlayedAs("gb10", 48, 500.0))
    assert "within 12 %: 50%" in stand_in.report(file)[-1]  # the step reads, the prompt computes
    sweep.write(file, H200, made, sweep.PlayedAs("gb10", 48, 4550.0, 465.0))
    assert "within 12 %: 50%" in stand_in.report(file)[-1]
    file.write_text("{}")
    with pytest.raises(BadSetting, match="holds no sweep"):
        stand_in.report(file)


def test_a_stand_in_is_never_recorded() -> None:
    for options in (["--as", "gb10"], ["--sms", "48"]):
        with pytest.raises(BadSetting, match="a stand-in's"):
            load("bench")(["sweep", "--record", *options], standalone_mode=False)
    with pytest.raises(BadSetting, match="--precision other"):
        load("bench")(["sweep", "--precision", "other"], standalone_mode=False)


def test_all_sms_need_no_context() -> None:
    with fewer_sms(None) as seen:
        assert seen is None
