"""``bench MODEL --speculative-acceptance``: rows, a set acceptance, and runs on a CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from typer.testing import CliRunner

from microscale.cli import app
from microscale.engine.config import EngineConfig
from microscale.engine.engine import Engine
from microscale.engine.speculation.length import tokens_of
from microscale.engine.work import Work
from microscale.errors import BadSetting
from microscale.models.families import AnyModel
from microscale.models.outline import Outline, outline
from microscale.planning.plan import Setup
from microscale_lab.cli.bench_speculative import parse_drafts
from microscale_lab.model_bench import speculative
from microscale_lab.model_bench.chosen import ChosenStep, RecordingSpeculation, shares, shares_line
from microscale_lab.model_bench.speculative import AUTO, TURNS, DraftBenchPlan, _Batch, run
from microscale_lab.model_bench.speculative_table import DraftRow, as_json, best, header, line, summary
from support.loading import load_model

pytestmark = pytest.mark.nightly


@cache
def tiny() -> tuple[AnyModel, Outline, Setup]:
    model = load_model(EngineConfig("gpt-oss-tiny", load_format="dummy", device="cpu"))
    ops = model.ops
    shape = outline("gpt-oss-tiny", model.config, ops.activations, model.page_size, model.config.max_context)
    return model, shape, Setup(ops.gpu, ops.activations)


def test_which_drafts() -> None:
    assert parse_drafts("0..3") == (0, 1, 2, 3)
    assert parse_drafts("0,5, auto") == (0, 5, AUTO)
    assert parse_drafts("2,0..2,2") == (2, 0, 1)
    for wrong in ("", "1..", "a", "0;1", "16", "-1", "3..1"):
        with pytest.raises(BadSetting, match="--speculative-tokens"):
            parse_drafts(wrong)


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_what_is_accepted_is_set(sequences: int, acceptance: float) -> None:
    batch = _Batch(*tiny(), DraftBenchPlan(acceptance, (0, 1, 4), depth=9, steps=4), sequences)
    measured = batch.measure()
    assert list(measured) == [0, 1, 4]
    for drafts, found in measured.items():
        assert found.tokens == sequences * (1 + acceptance * found.drafts)
        assert found.drafts == drafts
        assert found.seconds > 0
        assert len(found.steps) == TURNS * 4
    batch._engine.check()


def test_an_acceptance_between_is_met_on_average() -> None:
    batch = _Batch(*tiny(), DraftBenchPlan(0.7, (0, 3), depth=9, steps=100), 4)
    # Of 1,600 drafts, by a fixed seed.
    assert batch.measure()[3].tokens / 4 == pytest.approx(tokens_of(0.7, 3), rel=0.1)


def test_rows() -> None:
    model, shape, setup = tiny()
    plan = DraftBenchPlan(0.5, (0, 1, 2, AUTO), depth=5, steps=2, auto_steps=8, auto_learns=6)
    rows = list(run(model, shape, setup, plan, [1, 2]))
    assert [(row.sequences, row.drafts) for row in rows] == [(n, k) for n in (1, 2) for k in (0, 1, 2, AUTO)]
    for row in rows:
        assert row.ratio is not None
        assert row.step_ms > 0
        if isinstance(row.drafts, int):
            assert row.tok_s == pytest.approx(1e3 * row.sequences * tokens_of(0.5, row.drafts) / row.step_ms)
            assert row.draft_length == row.drafts
            assert row.experts is not None
            assert not row.steps
        else:
            check_chosen(row)
    assert [row.ratio for row in rows if row.drafts == 0] == [1.0, 1.0]
    assert rows[2].tok_s_at["3"] == pytest.approx(3e3 / rows[2].step_ms)
    assert rows[0].tok_s_at["2"] is None
    chosen = best(rows)
    assert set(chosen) == {1, 2}
    assert all(row.drafts != AUTO for row in chosen.values())
    assert sum(bool(row["best"]) for row in as_json(rows)) == 2
    assert "2 sequences: K = " in summary(rows, 0.5)
    assert len(header()) <= 100 >= max(len(each) for row in rows for each in line(row).splitlines())


def check_chosen(row: DraftRow) -> None:
    """Of a row with requests of two steps: six in which it learns, eight that count."""
    assert [step.learning for step in row.steps] == [True] * 6 + [False] * 8
    kept = [step for step in row.steps if step.counts]
    # Even lengths ran while it learned. Of two sequences uneven ones (0 and 1, 0 and 2, 1 and 2) may run for the first
    # time now, each once.
    assert kept == [step for step in row.steps[6:] if not step.captured]
    assert len(kept) == 8 if row.sequences == 1 else len(kept) >= 8 - 3
    assert all(len(step.lengths) == row.sequences and step.ms > 0 for step in kept)
    drafts = [length for step in kept for length in step.lengths]
    assert row.draft_length == pytest.approx(sum(drafts) / len(drafts))
    assert row.tokens_a_step == pytest.approx(sum(tokens_of(0.5, length) for length in drafts) / len(drafts))
    assert row.chosen == {k: drafts.count(k) / len(drafts) for k in sorted(set(drafts))}
    assert line(row).splitlines()[1].split() == shares_line(row.chosen).split()
    [told] = as_json([row])
    assert told["chosen"] == row.chosen
    steps = told["steps"]
    assert isinstance(steps, list)
    assert [step["drafts"] for step in steps] == [sum(step.lengths) for step in row.steps]
    assert [step["longest"] for step in steps] == [max(step.lengths) for step in row.steps]
    assert steps[0].keys() == {"ms", "captured", "learning", "given", "drafts", "longest"}


def test_which_lengths_were_chosen_is_printed() -> None:
    def step(*lengths: int) -> ChosenStep:
        return ChosenStep(1.0, lengths, False, False, len(lengths))

    chosen = shares([step(0, 3), step(3, 3), step(1, 3), step(3, 3)])
    assert chosen == {0: 1 / 8, 1: 1 / 8, 3: 3 / 4}
    assert shares_line(chosen).split(maxsplit=1) == ["K:", "0 12%, 1 12%, 3 75%"]


def test_contexts_of_auto_are_no_longer_than_those_of_the_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are slower after more tokens: the same contexts, and requests one after the other."""
    seen: dict[str, int] = {}

    def ended(self: RecordingSpeculation, schedule: Sequence[Work]) -> None:
        seen.update((work.request.request_id, work.end) for work in schedule)
        plain(self, schedule)

    plain = RecordingSpeculation.ended
    monkeypatch.setattr(RecordingSpeculation, "ended", ended)
    plan = DraftBenchPlan(1.0, (0, 3, AUTO), depth=9, steps=5, auto_steps=20, auto_learns=10)
    _Batch(*tiny(), replace(plan, drafts=(0, 3)), 1).measure()
    deepest = max(seen.values())
    seen.clear()
    _Batch(*tiny(), plan, 1).measure()
    assert len(seen) == 10 // 5 + TURNS * (2 + plan.auto_requests)
    assert max(seen.values()) <= deepest <= plan.longest


def test_drafts_are_measured_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that has worked for a while is slower: no row may be measured first only."""
    ran: list[object] = []
    plain = _Batch._run_requests

    def note(self: _Batch, engine: Engine, *, learning: bool = False) -> tuple[float, list[ChosenStep]]:
        ran.append("learns" if learning else AUTO if engine is not self._engine else self._set.tokens)
        return plain(self, engine, learning=learning)

    monkeypatch.setattr(_Batch, "_run_requests", note)
    _Batch(*tiny(), DraftBenchPlan(0.5, (0, AUTO, 2), depth=5, steps=2, auto_steps=15, auto_learns=3), 1).measure()
    assert ran == [0, "learns", "learns", AUTO, AUTO, 2, *([0, AUTO, AUTO, 2] * (TURNS - 1))]


EAGLE3 = ["--speculative-config", '{"method": "eagle3", "num_speculative_tokens": 1}']


@pytest.mark.parametrize("drafter", [[], EAGLE3], ids=["free", "trained head"])
def test_the_embedded_model_by_the_command_line(monkeypatch: pytest.MonkeyPatch, drafter: list[str]) -> None:
    monkeypatch.setattr(speculative, "WARM_UP", 1)
    asked = ["bench", "demo", "--speculative-acceptance", "0.7", "--speculative-tokens", "0,2", "--concurrency", "1,2"]
    asked += drafter
    result = CliRunner().invoke(
        app, [*asked, "--steps", "2", "--depth", "8", "--device", "cpu", "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert [(row["sequences"], row["drafts"]) for row in rows] == [(1, 0), (1, 2), (2, 0), (2, 2)]
    assert all(row["tokens_a_step"] == pytest.approx(tokens_of(0.7, row["drafts"])) for row in rows)
    assert [row["draft_length"] for row in rows] == [0, 2, 0, 2]


def test_a_model_with_states_by_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many drafts as it verifies, for as many sequences as it drafts for."""
    monkeypatch.setattr(speculative, "WARM_UP", 1)
    asked = ["bench", "qwen3.6-tiny", "--load-format", "dummy", "--speculative-acceptance", "0.7", "--concurrency"]
    asked += ["2,64", "--steps", "2", "--depth", "8", "--device", "cpu", "--json"]
    result = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert result.exit_code == 0
    assert "Left out: 64 sequences" in result.stderr
    rows = json.loads(result.stdout)
    assert [(row["sequences"], row["drafts"], row["draft_length"]) for row in rows] == [(2, n, n) for n in range(4)]


def test_a_context_that_is_too_short_is_refused() -> None:
    asked = ["bench", "gpt-oss-tiny", "--load-format", "dummy", "--speculative-acceptance=0.5", "--depth", "999999"]
    with pytest.raises(BadSetting, match="999999 tokens and the steps after them need"):
        CliRunner().invoke(app, [*asked, "--device", "cpu"], catch_exceptions=False)
