"""What each precision gives and costs, and which one ``--precision auto`` takes."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from microscale.engine.config import EngineConfig
from microscale.engine.loading.memory import Workload
from microscale.engine.loading.precisions import (
    MAX_KL,
    PrecisionOffer,
    choose,
    costs_text,
    precision_offers,
    precisions_line,
    settle_precision,
)
from microscale.engine.loading.prepare import prepare
from microscale.engine.quality_costs import QualityCost, quality_costs, write
from microscale.errors import BadSetting
from microscale.hardware import known
from microscale.models.families import LoadFormat, find_config
from microscale.models.outline import Outline, outline
from microscale.planning.ops import Activations
from microscale.planning.plan import Setup, decide_use
from microscale.planning.precision import Precision, make_precision

DOCS = Path(__file__).parents[3] / "docs"
WORKLOAD = Workload(1024)


def shape_of(model: str) -> Outline:
    return outline(model, find_config(model, LoadFormat.DUMMY, {}, True), Activations.BF16, 16, 1024)


def settled(model: str, card: str, precision: Precision | None = None) -> tuple[str, str]:
    setup = Setup(known(card), Activations.BF16, precision=precision or make_precision("auto"))
    found, sentence = settle_precision(shape_of(model), setup, WORKLOAD)
    assert sentence is not None
    return str(found.precision), sentence


# ---- auto ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("card", ["rtx4090", "a100"])
def test_auto_takes_the_fastest_whose_measured_cost_is_small(card: str) -> None:
    """The embedded model is the one that was measured."""
    name, sentence = settled("demo", card)
    assert name == "fast"
    assert "auto takes fast, the fastest whose measured cost is at most 0.001 nats per token (4.1e-04)" in sentence


@pytest.mark.parametrize("model", ["gpt-oss-20b", "openai/gpt-oss-120b", "gemma-4-26b-a4b", "qwen3-30b-a3b"])
def test_auto_stays_with_exact_where_nothing_was_measured_and_says_so(model: str) -> None:
    """A figure of the embedded model says nothing about another one, not even of its family."""
    name, sentence = settled(model, "gb10")
    assert name == "exact"
    assert re.search(
        rf"stays with exact. balanced and fast: cost in quality not measured for {model.split('/')[-1]}", sentence
    )


def test_auto_takes_nothing_that_costs_more_or_is_not_faster() -> None:
    def offer(name: str, tok_s: float | None, kl: float) -> PrecisionOffer:
        cost = QualityCost("model", name, kl, "a machine", True, 120, "2026-11-18")
        return PrecisionOffer(name, tok_s, None if tok_s else "does not fit", cost, None)

    exact = offer("exact", 40.0, 0.0)
    assert choose([exact, offer("balanced", 50.0, MAX_KL), offer("fast", 70.0, MAX_KL * 1.1)])[0] == "balanced"
    name, sentence = choose([exact, offer("balanced", 39.0, 1e-5), offer("fast", 70.0, 2e-3)])
    assert name == "exact"
    assert "balanced: not faster; fast: costs 2.0e-03 nats per token, more than 0.001" in sentence
    assert choose([exact, offer("balanced", None, 1e-5)])[1].endswith("balanced: does not fit.")


def test_a_cost_that_was_measured_without_the_cards_activations_is_unknown() -> None:
    """It was measured on a CPU, whose activations are float32; large batches on a GB10 quantise them to MXFP8."""
    name, sentence = settled("demo", "gb10")
    assert name == "exact"
    assert "measured only without the 8-bit or 4-bit activations that it has on this GPU" in sentence


@pytest.mark.parametrize(("model", "wanted"), [("gemma-4-26b-a4b-nvfp4", "nvfp4"), ("qwen3.6-35b-a3b-nvfp4", "bf16")])
def test_fast_has_the_activations_that_a_checkpoint_is_published_for(model: str, wanted: str) -> None:
    shape = shape_of(model)
    setup, _ = settle_precision(
        shape, Setup(known("gb10"), Activations.BF16, precision=make_precision("fast")), WORKLOAD
    )
    experts = next(use for use in shape.uses if use.layer == "experts")
    assert decide_use(experts, setup)[-1].spec.activations == wanted
    asked = replace(setup, precision=replace(setup.precision, moe_activations="nvfp4"))
    assert decide_use(experts, asked)[-1].spec.activations == "nvfp4"


def test_auto_with_another_format_option_stays_with_exact() -> None:
    name, sentence = settled("demo", "rtx4090", make_precision("auto", kv_cache_dtype="fp8"))
    assert name == "exact, kv-cache=fp8"
    assert "not measured together with other format options" in sentence


def test_an_engine_on_a_cpu_settles_auto_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    options = EngineConfig("gpt-oss-tiny", load_format="dummy", device="cpu", precision="auto", max_model_len=128)
    with caplog.at_level(logging.INFO):
        assert str(prepare(options).setup.precision) == "exact"
    assert "--precision auto stays with exact" in caplog.text


def test_a_wrong_name_lists_auto() -> None:
    with pytest.raises(BadSetting, match="known are exact, balanced, fast, auto"):
        make_precision("quick")


# ---- in one line -----------------------------------------------------------------------------------------------------


def test_the_line_of_a_start_has_each_speed_and_where_costs_come_from() -> None:
    offers = precision_offers(shape_of("gpt-oss-120b"), Setup(known("gb10"), Activations.BF16), WORKLOAD)
    line = precisions_line("gpt-oss-120b", "NVIDIA GB10", offers)
    speeds = r"exact 4\d\.\d, balanced \d\d\.\d, fast \d\d\.\d tokens per second"
    assert re.match(rf"Predicted for one sequence on NVIDIA GB10: {speeds}; cost in quality not measured", line)
    assert "the toy microscale-demo: balanced 2.9e-05, fast 4.1e-04 (KL divergence per token, docs/quality.md)" in line
    assert "\n" not in line


def test_what_does_not_fit_has_no_speed() -> None:
    offers = precision_offers(shape_of("gpt-oss-120b"), Setup(known("rtx5090"), Activations.BF16), WORKLOAD)
    assert [(offer.tok_s, offer.why_not) for offer in offers] == [(None, "does not fit")] * 3
    assert [offer.to_json()["tok_s"] for offer in offers] == [None] * 3


def test_known_costs_are_the_models_own() -> None:
    offers = precision_offers(shape_of("demo"), Setup(known("rtx4090"), Activations.BF16), WORKLOAD)
    text = costs_text("demo", offers)
    assert text == "cost in quality: balanced 2.9e-05, fast 4.1e-04 (KL divergence per token, docs/quality.md)"


# ---- the table -------------------------------------------------------------------------------------------------------


def test_the_page_and_the_table_have_the_same_costs() -> None:
    """docs/quality.md and ``quality_costs.json`` come from one run: ``make quality``."""
    page = (DOCS / "quality.md").read_text()
    for model in {cost.model for cost in quality_costs()}:
        section = page.split(f"<!-- begin of the quality of {model} -->")[1].split("<!-- end")[0]
        cells = [re.split(r" *\| *", line) for line in section.splitlines() if line.startswith("| `")]
        rows = {row[1].strip("`"): float(row[4]) for row in cells if len(row) == 7}
        costs = [cost for cost in quality_costs() if cost.model == model]
        assert {cost.precision: cost.kl for cost in costs} == {
            name: rows[name] for name in ("exact", "balanced", "fast")
        }
        (where,) = {(cost.prompts, cost.device, cost.date) for cost in costs}
        assert re.search(rf"{where[0]} prompts, {where[1]}, torch \S+, {where[2]}\.", section)


def test_a_recorded_model_replaces_its_rows_only(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text("[]")
    old, other, new = (
        QualityCost(model, "fast", kl, "H200", True, 8, "2026-11-18")
        for model, kl in (("a", 1e-3), ("b", 2e-3), ("a", 3e-3))
    )
    write([old], file)
    write([other], file)
    write([new], file)
    assert quality_costs(file) == (other, new)
