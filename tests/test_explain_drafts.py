"""``explain --speculative``: what steps with drafts cost, and from which acceptance on they are worth it."""

from __future__ import annotations

import json
import re

import pytest
from rich.markup import render as render_markup
from typer.testing import CliRunner

from microscale.cli import app
from microscale.engine.speculation.length import acceptance_for, tokens_of
from microscale.errors import BadSetting
from microscale.explain import Question, Report, explain, render
from microscale.explain.speculative import DRAFTS, LENGTHS, SEQUENCES, DraftedStep
from microscale.hardware import KNOWN
from microscale.hardware.speeds_of_others import DRAFTS_FILE, published_drafts
from microscale.models.families import PRESETS

CARDS = ("gb10", "rtx5090", "rtxpro6000", "h200")


def ask(model: str, gpu: str, drafter: str = "ngram", **options: object) -> Report:
    return explain(Question(model, gpu, speculative=drafter, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("model", ["gpt-oss-20b", "gpt-oss-120b", "gemma-4-26b-a4b"])
def test_what_steps_cost(model: str, card: str) -> None:
    report = ask(model, card)
    assert report.drafts is not None
    for batch in report.drafts.batches:
        steps = batch.steps
        assert [step.drafts for step in steps] == list(DRAFTS)
        assert [step.us for step in steps] == sorted(step.us for step in steps)
        assert all(step.experts is not None for step in steps)
        for step in steps[1:]:
            ratio, even = batch.ratio(step), batch.break_even(step)
            # At the break-even the tokens are worth the time, by the formula that the docs have.
            assert even is not None
            assert tokens_of(even, step.drafts) == pytest.approx(ratio, rel=1e-6)
            assert 1 < ratio < 1.5 + step.drafts
        # K drafts of one sequence use as many experts as K + 1 sequences.
        assert steps[3].experts == pytest.approx(_experts(report, 4 * batch.sequences))


def _experts(report: Report, tokens: int) -> float:
    spec = next(use.spec for use in report.outline.uses if use.op == "moe")
    return float(spec.num_experts * (1 - (1 - spec.top_k / spec.num_experts) ** tokens))


def test_without_drafts_it_is_the_other_prediction() -> None:
    report = ask("gpt-oss-20b", "h200")
    assert report.drafts is not None
    assert report.drafts.batches[0].alone.us == pytest.approx(report.asked and report.asked.us)


def test_drafts_read_keys_once() -> None:
    """After a long context attention is most of a step, and drafts cost less of it, not a multiple."""
    short, long = (ask("gpt-oss-20b", "h200", context=tokens).drafts for tokens in (512, 131072))
    assert short is not None
    assert long is not None
    first, second = (drafts.batches[0] for drafts in (short, long))
    assert second.alone.us > 1.5 * first.alone.us
    assert second.ratio(second.steps[3]) < first.ratio(first.steps[3])


def test_a_head_costs_its_passes_and_saves_the_wait_for_the_host() -> None:
    """EAGLE3 makes a pass for each draft. Its drafts stay on the device; those of ``ngram`` come from the host, and
    with several ranks the host reads every step with drafts."""
    steps = {
        (drafter, ranks): _first_steps(drafter, ranks) for drafter in ("ngram", "eagle3") for ranks in (1, 2)
    }  # fmt: skip
    alone, one = (step.us for step in steps["eagle3", 1][:2])
    assert alone < one
    for ranks in (1, 2):
        assert steps["ngram", ranks][0].us == steps["eagle3", ranks][0].us
    passes = [
        steps["eagle3", 2][count].us / steps["eagle3", 2][0].us - steps["ngram", 2][count].us / steps["ngram", 2][0].us
        for count in (1, 2, 3)
    ]
    assert passes == pytest.approx([passes[0], 2 * passes[0], 3 * passes[0]], rel=0.01)
    assert passes[0] > 0


def _first_steps(drafter: str, ranks: int) -> tuple[DraftedStep, ...]:
    drafts = ask("gpt-oss-120b", "gb10", drafter, tensor_parallel_size=ranks).drafts
    assert drafts is not None
    return drafts.batches[0].steps


def test_a_head_that_is_not_known_is_refused() -> None:
    with pytest.raises(BadSetting, match="--speculative eagle3: no draft head for gemma-4-26b-a4b is known"):
        ask("gemma-4-26b-a4b", "gb10", "eagle3")


def test_the_best_number_of_drafts() -> None:
    report = ask("gpt-oss-20b", "h200")
    assert report.drafts is not None
    for batch in report.drafts.batches:
        for length in LENGTHS:
            best = batch.best(length)
            assert tokens_of(best.acceptance, 3) == pytest.approx(length)
            others = [step.sequences * tokens_of(best.acceptance, step.drafts) / step.us * 1e6 for step in batch.steps]
            assert best.tok_s == pytest.approx(max(others))
    assert acceptance_for(2.01, 1) is None


def test_text_and_json() -> None:
    report = ask("gpt-oss-20b", "rtx5090", context=2048)
    lines = [render_markup(line).plain for line in render(report)]
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line != line.rstrip()]
    text = "\n".join(lines)
    found = re.findall(r"at K = 3 a step costs (\d\.\d\d) x; it is faster above an acceptance of (\d+)%", text)
    assert len(found) == len(SEQUENCES)
    data = json.loads(json.dumps(report.to_json()))["speculative"]
    assert [batch["sequences"] for batch in data["batches"]] == list(SEQUENCES)
    for (ratio, pays), batch in zip(found, data["batches"], strict=True):
        step = batch["steps"][3]
        assert float(ratio) == pytest.approx(step["ratio"], abs=0.006)
        assert int(pays) == pytest.approx(100 * step["pays_from_acceptance"], abs=0.6)
        assert step["tok_s_at_acceptance_length"]["2.5"] == pytest.approx(
            2.5e6 * batch["sequences"] / step["us"], rel=1e-3
        )
        assert batch["steps"][1]["tok_s_at_acceptance_length"]["2.5"] is None
        assert [best["acceptance_length"] for best in batch["best"]] == list(LENGTHS)
    assert "speculative" not in explain(Question("gpt-oss-20b", "rtx5090")).to_json()


def test_the_option() -> None:
    asked = ["explain", "gpt-oss-20b", "--gpu", "gb10", "--speculative", "ngram", "--json"]
    result = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["speculative"]["drafter"] == "ngram"


def test_what_others_publish_has_a_source() -> None:
    rows = json.loads(DRAFTS_FILE.read_text())
    assert {row["gpu"] for row in rows} <= set(KNOWN)
    assert {row["model"] for row in rows} <= set(PRESETS)
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\d", row["date"]) and "/" in row["source"] for row in rows)
    found = published_drafts("gemma-4-26b-a4b", KNOWN["gb10"])
    assert {row.drafts for row in found} == {2, 4}
    text = "\n".join(render_markup(line).plain for line in render(ask("gemma-4-26b-a4b", "gb10")))
    assert "spark-vllm-docker/issues/343" in text


def test_a_heads_memory_is_in_the_account() -> None:
    plain, headed = ask("gpt-oss-20b", "h200"), ask("gpt-oss-20b", "h200", "eagle3")
    assert headed.memory.weights.keys() - plain.memory.weights.keys() == {"draft_head"}
    assert headed.memory.kv.full_per_token > plain.memory.kv.full_per_token
    assert headed.memory.max_context <= plain.memory.max_context
    assert "draft_head" in json.dumps(headed.to_json()["memory"])
    assert "draft_head" in "\n".join(render(headed))


EAGLE3 = '{"method": "eagle3", "num_speculative_tokens": 3%s}'


def test_a_quantized_head_takes_half_the_memory_and_less_time() -> None:
    plain, narrow, whole = (
        ask("gpt-oss-20b", "h200", EAGLE3 % more)
        for more in ("", ', "draft_lm_head": "mxfp8"', ', "quantization": "mxfp8"')
    )
    held = [report.memory.weights["draft_head"] for report in (plain, narrow, whole)]
    assert held[2] == pytest.approx(held[0] * 33 / 64, rel=0.01)
    assert held[2] < held[1] < held[0]
    steps = [report.drafts.batches[0].steps for report in (plain, narrow, whole) if report.drafts is not None]
    # Three passes for three drafts. A pass reads 566 MB in BF16, 475 and 292 in the others; a step 3.7 GB in 1.32 ms.
    saved = [steps[0][3].us - other[3].us for other in steps[1:]]
    assert saved[0] == pytest.approx(3 * 91e6 / 2.8e6, rel=0.15)
    assert saved[1] == pytest.approx(3 * 274e6 / 2.8e6, rel=0.15)


def test_explain_takes_what_a_server_takes() -> None:
    report = ask("gpt-oss-20b", "h200", EAGLE3 % ', "quantization": "mxfp8"')
    text = "\n".join(render_markup(line).plain for line in render(report))
    assert "the head: fc, qkv, o, mlp.gate_up, mlp.down, lm_head in mxfp8" in text
    told = json.loads(json.dumps(report.to_json()))["speculative"]
    assert told["drafter"] == "eagle3"
    assert {entry["chosen"] for entry in told["head"] if entry["op"] == "dense"} == {"triton_mxfp8"}
    assert len(told["batches"][0]["steps"]) == 4
    by_name = ask("gpt-oss-20b", "h200", "eagle3")
    same = ask("gpt-oss-20b", "h200", EAGLE3 % "")
    assert same.memory == by_name.memory
    with pytest.raises(BadSetting, match="method dflash needs a draft head"):
        ask("gpt-oss-20b", "h200", '{"method": "dflash", "num_speculative_tokens": 3}')


def test_the_embedded_model_has_a_head() -> None:
    report = ask("demo", "h200", "eagle3")
    assert 3 << 20 < report.memory.weights["draft_head"] < 4 << 20
