"""``bench MODEL``: which rows there are, and a run on the tiny model."""

from __future__ import annotations

import pytest

from microscale.bench.cases import BenchCase, check_lengths, make_cases
from microscale.bench.energy import EnergyMeter
from microscale.bench.model import begin_decoding, header, line, make_engine, run
from microscale.engine.config import EngineConfig
from microscale.errors import BadSetting, Unsupported
from microscale.models.outline import outline
from microscale.planning.plan import Setup
from support.loading import load_model


def test_prompts_run_alone_and_decoding_at_every_batch_and_depth() -> None:
    cases = make_cases(["pp512", "tg128"], [1, 8], [128, 4096])
    assert cases == [
        BenchCase("pp", 512, 1, 0),
        *(BenchCase("tg", 128, batch, depth) for batch in (1, 8) for depth in (128, 4096)),
    ]


@pytest.mark.parametrize("test", ["pp", "tg0", "xx5", "pp-1", ""])
def test_unknown_tests_are_refused(test: str) -> None:
    with pytest.raises(BadSetting, match="Unknown test"):
        make_cases([test], [1], [0])


def test_a_row_beyond_the_context_is_refused() -> None:
    with pytest.raises(BadSetting, match="tg128 after 900 tokens needs 1029 positions; the model has 1000"):
        check_lengths(make_cases(["tg128"], [1], [900]), 1000)


def test_rows_of_the_tiny_model() -> None:
    model = load_model(EngineConfig("gpt-oss-tiny", load_format="dummy", device="cpu"))
    ops = model.ops
    shape = outline("gpt-oss-tiny", model.config, ops.activations, model.page_size, model.config.max_context)
    cases = make_cases(["pp20", "tg3"], [2], [9])
    rows = list(run(model, shape, Setup(ops.gpu, ops.activations), cases, step_tokens=16, repeats=1))
    assert [(row.test, row.batch, row.depth) for row in rows] == [("pp20", 1, 0), ("tg3", 2, 9)]
    assert all(0 < row.tok_s < row.ceiling_tok_s for row in rows)
    assert all(min(row.runs) <= row.tok_s <= max(row.runs) for row in rows)
    assert [len(line(row).split()) for row in rows] == [8, 8]
    assert len(header().split()) == 10  # "of it" and "explain says" are two words each


def test_decoding_begins_when_all_prompts_are_computed() -> None:
    model = load_model(EngineConfig("gpt-oss-tiny", load_format="dummy", device="cpu"))
    case = BenchCase("tg", 3, 4, 10)
    engine = make_engine(model, case, step_tokens=16)
    assert begin_decoding(engine, model.config.vocab_size, case, 16) == 4 * 3
    steps = []
    while engine.has_work:
        steps.append(len(engine.step()))
    assert steps == [0, 4, 4, 4]  # all are launched here, and each is read when the next one is on its way


class Counter(EnergyMeter):
    """Grows with every look at it."""

    def __init__(self, step: float) -> None:
        self.step, self.value = step, 0.0

    def joules(self) -> float:
        self.value += self.step
        return self.value


def test_energy_is_that_of_the_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microscale.bench.model.ENERGY_S", 0.0)
    model = load_model(EngineConfig("gpt-oss-tiny", load_format="dummy", device="cpu"))
    ops = model.ops
    shape = outline("gpt-oss-tiny", model.config, ops.activations, model.page_size, model.config.max_context)
    cases = make_cases(["pp20", "tg3"], [2], [9])
    setup = Setup(ops.gpu, ops.activations)
    rows = list(run(model, shape, setup, cases, step_tokens=32, repeats=1, meter=Counter(10.0)))
    assert [row.tokens_per_joule for row in rows] == [2.0, 0.6]
    assert all(row.watts is not None and row.watts > 0 for row in rows)
    assert [len(line(row).split()) for row in rows] == [10, 10]
    assert header(energy=True).split()[-2:] == ["W", "tok/J"]
    with pytest.raises(Unsupported, match="did not move"):
        list(run(model, shape, setup, cases, step_tokens=32, repeats=1, meter=Counter(0.0)))
