"""``microscale quality``: checks, tasks, distances, and a run on a model of random weights."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from microscale.cli import app
from microscale.engine.config import EngineConfig
from microscale.errors import BadCheckpoint, BadSetting, Unsupported
from microscale.models.gpt_oss.config import alternating
from microscale.planning.precision import make_precision
from microscale.text.formats import chat_format_for
from microscale.text.tokenizer import Tokenizer
from microscale_lab.markdown import write_section
from microscale_lab.quality.checks import ModelAnswer, fits, is_exact, is_right
from microscale_lab.quality.measure import Distance, distance, greedy, greedy_after
from microscale_lab.quality.report import BAR, as_costs, as_json, as_markdown, bar, table
from microscale_lab.quality.run import REFERENCE, ChoiceResult, Comparison, PrecisionChoice, all_choices, choose, run
from microscale_lab.quality.tasks import DEMO_FOLDER, FILE_NAME, Encoded, dump_tasks, encode, load_tasks
from support.loading import load_model
from support.tiny_checkpoints import CASES, write_hf


def said(content: str = "", calls: tuple[tuple[str, str], ...] = ()) -> ModelAnswer:
    return ModelAnswer("", content, calls, ())


@pytest.mark.parametrize(
    ("content", "value", "right"),
    [
        ("247 + 385 = 632.", 632, True),
        ("It is 632 and not 633.", 632, False),
        ("208 - 381 = -173.", -173, True),
        ("no number", 3, False),
        ("2.5 metres", 2.5, True),
    ],
)
def test_the_last_number_counts(content: str, value: float, right: bool) -> None:
    assert is_right(said(content), {"kind": "number", "value": value}) is right


def test_words_are_found_whole() -> None:
    check = {"kind": "contains", "value": "Male"}
    assert is_right(said("The capital is Male."), check)
    assert not is_right(said("The capital is Malea."), check)
    assert is_right(said("How are you?"), {"kind": "contains", "value": "?"})


def test_a_call_must_be_exactly_right() -> None:
    check = {"kind": "call", "name": "f", "arguments": {"x": 1}}
    assert is_right(said(calls=(("f", '{"x": 1}'),)), check)
    for calls in (
        (("g", '{"x": 1}'),),
        (("f", '{"x": 2}'),),
        (("f", "{"),),
        (("f", '{"x": true}'),),
        (),
        (("f", '{"x":1}'), ("f", '{"x":1}')),
    ):
        assert not is_right(said(calls=calls), check)


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": "string", "enum": ["a"]},
                   "l": {"type": "array", "items": {"type": "string"}}},
    "required": ["n"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        ({"n": 1}, True),
        ({"n": 1, "s": "a", "l": ["x"]}, True),
        ({"n": True}, False),
        ({"n": 1.5}, False),
        ({"s": "a"}, False),
        ({"n": 1, "s": "b"}, False),
        ({"n": 1, "l": [2]}, False),
        ({"n": 1, "z": 1}, False),
        ([], False),
    ],
)
def test_json_answers_are_held_against_their_schema(value: object, valid: bool) -> None:
    assert fits(value, SCHEMA) is valid
    check = {"kind": "json", "schema": SCHEMA, "value": {"n": 1}}
    assert is_right(said(json.dumps(value)), check) is valid
    assert is_exact(said(json.dumps(value)), check) is (value == {"n": 1} and valid)


def test_unknown_keywords_and_checks_are_refused() -> None:
    with pytest.raises(Unsupported, match="have no minimum"):
        fits(1, {"type": "integer", "minimum": 0})
    with pytest.raises(Unsupported, match="Unknown kind of check"):
        is_right(said(), {"kind": "smell"})


def test_the_shipped_tasks_survive_a_round_trip(tmp_path: Path) -> None:
    tasks = load_tasks(DEMO_FOLDER / FILE_NAME)
    assert len({task.task for task in tasks}) == 15
    dump_tasks(tasks, tmp_path / FILE_NAME)
    assert (tmp_path / FILE_NAME).read_bytes() == (DEMO_FOLDER / FILE_NAME).read_bytes()
    assert len(load_tasks(tmp_path / FILE_NAME, 2)) == 30
    with pytest.raises(BadCheckpoint, match="cannot be read as held-out tasks"):
        load_tasks(tmp_path / "nothing")


def test_choices_begin_with_float32_and_are_found_by_name() -> None:
    assert all_choices()[0].name == REFERENCE
    assert [choice.name for choice in choose(["qkv=mxfp4", "fast"])] == [REFERENCE, "fast", "qkv=mxfp4"]
    assert len(choose([])) == len(all_choices()) >= 17
    with pytest.raises(BadSetting, match="Unknown choice 'slow'"):
        choose(["slow"])


def test_distance_by_hand() -> None:
    exact = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    other = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    item = Encoded(load_tasks(DEMO_FOLDER / FILE_NAME, 1)[0], [0], [0, 0])
    found = distance([other], [exact], [item])
    assert found.loss == pytest.approx(-(math.log(0.25) + math.log(0.9)) / 2)
    assert found.kl == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)) / 2, rel=1e-5)
    assert found.top1 == 0.5
    assert distance([exact], [exact], [item]).kl == 0


def test_bars() -> None:
    assert bar(0.0) == bar(1e-7) == ""
    assert bar(1.0) == bar(5.0) == "█" * BAR
    assert 9 <= len(bar(1e-3)) <= 11


def test_the_page_is_rewritten_between_its_markers(tmp_path: Path) -> None:
    rows = [
        ChoiceResult(REFERENCE, 0.975, Distance(0.01, 0.0, 1.0), {"json": 1.0, "sums": 0.95}),
        ChoiceResult("fast", 0.9, Distance(0.0123, 4.2e-3, 0.991), {"json": 0.8, "sums": 1.0}),
        ChoiceResult("qkv=fp8", 0.97, Distance(0.01, 1e-5, 1.0), {"json": 1.0, "sums": 0.94}),
        ChoiceResult("moe-activations=mxfp8", reason="moe-activations: nothing runs it; and more."),
    ]
    page = tmp_path / "quality.md"
    page.write_text("# Quality\n\nWords.\n")
    for title in ("first", "second"):
        write_section(page, "quality of model", as_markdown(rows, title, "2 prompts."))
    assert page.read_text().splitlines() == [
        "# Quality", "", "Words.", "", "<!-- begin of the quality of model -->", "## second", "", "2 prompts.", "",
        "| choice | right answers | loss | KL from float32 | same likeliest token |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| `float32` | 97.5 % | 0.0100 | 0 | 100.00 % |",
        "| `fast` | 90.0 % | 0.0123 | 4.2e-03 | 99.10 % |",
        "| `qkv=fp8` | 97.0 % | 0.0100 | 1.0e-05 | 100.00 % |",
        "", "Right answers by task:", "", "| task | `float32` | `fast` |", "| --- | ---: | ---: |",
        "| json | 100 % | 80 % |", "| sums | 95 % | 100 % |",
        "", "- `moe-activations=mxfp8` did not run: moe-activations: nothing runs it.",
        "<!-- end of the quality of model -->",
    ]  # fmt: skip
    with pytest.raises(BadSetting, match="cannot be rewritten"):
        write_section(tmp_path / "none.md", "quality of model", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with the demo model's tokenizer."""
    config = replace(
        CASES["heads_4_2"], vocab_size=4096, max_context=4096, sliding_window=32, num_layers=2,
        layer_kinds=alternating(2), eos_token_ids=(2, 1, 8),
    )  # fmt: skip
    made = write_hf(tmp_path_factory.mktemp("quality") / "model", config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (made / name).write_bytes((DEMO_FOLDER / name).read_bytes())
    return made


def test_coarser_formats_are_further_from_float32(folder: Path) -> None:
    tasks = load_tasks(DEMO_FOLDER / FILE_NAME, 1)[:3]
    four_bits = "experts=nvfp4, moe-activations=nvfp4"
    wanted = choose(["exact", "lm_head=mxfp8", "lm_head=mxfp4", "moe-activations=mxfp8", "experts=nvfp4", four_bits])
    wanted.append(PrecisionChoice("impossible", make_precision("exact", ("experts=bf16",))))
    rows = list(run(Comparison(str(folder), Tokenizer.load(folder), tasks, wanted, device="cpu", max_tokens=4)))
    by_name = {row.choice: row for row in rows}
    kl = {name: row.distance.kl for name, row in by_name.items() if row.distance}
    assert kl[REFERENCE] == 0
    assert kl["exact"] < 1e-6 < kl["lm_head=mxfp8"] < kl["lm_head=mxfp4"]
    assert kl["exact"] < kl["moe-activations=mxfp8"] < kl[four_bits]
    assert kl["experts=nvfp4"] < kl[four_bits]
    assert all(row.accuracy is not None for row in rows if row.distance)
    # What cannot run here says why, and the others go on.
    assert "experts=bf16" in (by_name["impossible"].reason or "")
    lines = table(rows).splitlines()
    assert len(lines) == len(rows) + 1
    assert json.loads(json.dumps(as_json(rows)))[0]["choice"] == REFERENCE


def test_an_answer_goes_on_where_it_leaves_the_draft(folder: Path) -> None:
    chat_format = chat_format_for(Tokenizer.load(folder))
    encoded = [encode(task, chat_format) for task in load_tasks(DEMO_FOLDER / FILE_NAME, 1)[:4]]
    exact, coarse = (
        load_model(EngineConfig(str(folder), device="cpu", **choice.precision.options()))
        for choice in choose(["lm_head=mxfp4"])
    )
    drafts, wanted = (greedy(model, encoded, 8) for model in (exact, coarse))
    heard: list[int] = []
    assert drafts != wanted
    assert greedy_after(coarse, encoded, drafts, 8, heard.append) == wanted
    assert greedy_after(exact, encoded, drafts, 8, heard.append) == drafts
    assert sum(heard) == 2 * len(encoded)


def test_the_command_prints_json(folder: Path) -> None:
    words = [
        "quality",
        str(folder),
        "--choice",
        "kv-cache=fp8",
        "--samples",
        "1",
        "--max-tokens",
        "4",
        "--device",
        "cpu",
        "--json",
    ]
    tasks = folder / FILE_NAME
    dump_tasks(load_tasks(DEMO_FOLDER / FILE_NAME, 1)[:2], tasks)
    page = folder / "page.md"
    page.write_text("# Page\n")
    result = CliRunner().invoke(app, [*words, "--tasks", str(tasks), "--markdown", str(page)])
    assert result.exit_code == 0, result.output
    assert "| `kv-cache=fp8` |" in page.read_text()
    rows = json.loads(result.stdout)
    assert [row["choice"] for row in rows] == [REFERENCE, "kv-cache=fp8"]
    assert rows[1]["distance"]["kl"] > 0


def test_what_is_recorded_is_what_the_page_says() -> None:
    """Only of precisions, in the page's two digits; what did not run has no cost."""
    rows = [
        ChoiceResult(REFERENCE, 0.975, Distance(0.01, 0.0, 1.0), {"json": 1.0}),
        ChoiceResult("exact", 0.975, Distance(0.01, 0.0, 1.0), {"json": 1.0}),
        ChoiceResult("balanced", reason="nothing runs it"),
        ChoiceResult("fast", 0.9, Distance(0.0123, 4.2345e-3, 0.991), {"json": 0.8}),
    ]
    costs = as_costs(rows, "model", "NVIDIA H200", 2, True)
    assert [(cost.model, cost.precision, cost.kl) for cost in costs] == [
        ("model", "exact", 0.0),
        ("model", "fast", 4.2e-3),
    ]
    assert "| 4.2e-03 |" in as_markdown(rows, "model", "2 prompts.")
