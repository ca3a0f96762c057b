"""``bench --speculative-acceptance`` and lengths by arithmetic on a real GPU: captured steps, for 1 and many sequences.
Nothing is timed here; ``-s`` prints the rows."""

from __future__ import annotations

from functools import cache

import pytest

from microscale.engine.config import EngineConfig
from microscale.engine.speculation.length import tokens_of
from microscale.models.families import AnyModel
from microscale.models.outline import Outline, outline
from microscale.planning.plan import Setup
from microscale_lab.model_bench.speculative import AUTO, DraftBenchPlan, _Batch, run
from microscale_lab.model_bench.speculative_table import header, line
from support.loading import load_model

SHAPE = {"num_hidden_layers": 4, "num_local_experts": 32, "vocab_size": 4096}
pytestmark = pytest.mark.starts("gpt-oss-20b", SHAPE)


@cache
def loaded() -> tuple[AnyModel, Outline, Setup]:
    options = EngineConfig("gpt-oss-20b", load_format="dummy", device="cuda", hf_overrides=dict(SHAPE))
    model = load_model(options)
    ops = model.ops
    shape = outline("gpt-oss-20b", model.config, ops.activations, model.page_size, model.config.max_context)
    return model, shape, Setup(ops.gpu, ops.activations)


@pytest.mark.parametrize("sequences", [1, 4, 64])
@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_what_is_accepted_is_set(sequences: int, acceptance: float) -> None:
    batch = _Batch(*loaded(), DraftBenchPlan(acceptance, (0, 1, 3, 7), depth=40, steps=8), sequences)
    for drafts, found in batch.measure().items():
        assert found.tokens == sequences * (1 + acceptance * found.drafts)
        assert found.drafts == drafts
    batch._engine.check()


def test_rows_and_the_engines_own_choice() -> None:
    plan = DraftBenchPlan(0.7, (0, 3, AUTO), depth=40, steps=16, auto_steps=200)
    rows = list(run(*loaded(), plan, [1, 16]))
    print("", header(), *map(line, rows), sep="\n")
    for row in rows:
        assert row.step_ms > 0
        if row.drafts == AUTO:
            assert 0 <= row.draft_length <= 3
            assert 1 <= row.tokens_a_step <= 4
        else:
            assert row.tokens_a_step == pytest.approx(tokens_of(0.7, int(row.drafts)))
