"""The answer of ``explain``: six lines, and the table that compares cards or precisions."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from rich.markup import render as render_markup
from typer.testing import CliRunner

from microscale.cli import app
from microscale.explain import Question, answer_lines, compare_lines, explain
from microscale.planning.precision import PRECISIONS, make_precision

LABELS = ("fits", "speed", "precision", "to improve", "others")


def answer(model: str, gpu: str | None = None, **options: Any) -> dict[str, str]:
    """Label → text; the first line's label is ``head``."""
    found: dict[str, str] = {}
    label = "head"
    for line in answer_lines(explain(Question(model, gpu, **options))):
        text = render_markup(line).plain
        assert len(text) <= 80
        label = next((name for name in (*LABELS, "note") if text.startswith(f"{name:<11}")), label)
        found[label] = f"{found.get(label, '')} {text.removeprefix(f'{label:<11}').strip()}".strip()
    return found


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["explain", *arguments])
    return result.exit_code, result.output


def test_a_model_that_fits_has_its_six_lines() -> None:
    found = answer("gpt-oss-120b", "gb10")
    assert list(found) == ["head", *LABELS]
    assert found["head"] == "gpt-oss-120b on NVIDIA GB10, precision exact"
    assert re.fullmatch(r"yes: 64\.\d of 108\.0 GiB; up to 131072 tokens, or \d+ sequences of 4096", found["fits"])
    speed = r"41\.\d \(3\d\.\d-4\d\.\d\) tokens per second after 4096 tokens, first token of such a prompt after"
    assert re.match(rf"{speed} \d+ ms \(\d+ ms to [\d.]+ m?s\): fitted from an H200's", found["speed"])
    assert "exact 41.0, balanced 56.1, fast 70.8 tokens per second; best of known cost: exact" in found["precision"]
    assert "not measured for gpt-oss-120b; the toy microscale-demo" in found["precision"]
    assert re.match(r"--precision fast is 7\d% faster; the card allows at most 46\.\d in exact", found["to improve"])
    assert re.match(r"vLLM.*: 57\.5 tokens per second after 1024 tokens \(2026-03-22, ", found["others"])


@pytest.mark.parametrize("name", ["gemma-4-26b-a4b", "google/gemma-4-26B-A4B-it"])
def test_a_preset_that_is_not_as_published_says_so(name: str) -> None:
    published = "google/gemma-4-26B-A4B-it is in BF16 and runs with --layer-format experts=mxfp8"
    assert answer(name, "h200")["note"] == f"these figures are for MXFP8; {published}"


@pytest.mark.parametrize("options", [(), ("--why",), ("--json",), ("--speculative", "ngram"), ("--gpu", "l40s")])
def test_what_does_not_fit_has_no_speed(options: Sequence[str]) -> None:
    """In no form of the report, except for what others publish."""
    status, text = run("gpt-oss-120b", "--gpu", "5090", *options)
    assert status == 1
    assert "does not fit" in text or "--json" in options
    if "--json" in options:
        data = json.loads(text)
        assert (data["fits"], data["predicted"]["decode"], data["predicted"]["prefill"]) == (False, [], [])
        assert data["predicted"]["decode_tok_s"] is data["predicted"]["prefill_tok_s"] is None
        assert "63.3 GiB" in data["refusal"]
    else:
        assert not re.search(r"[\d)] +tokens per second", text)
        assert not re.search(r"\d m?s\b", text.split("memory, GiB")[-1])


def test_what_would_make_it_fit() -> None:
    found = answer("gpt-oss-20b", "4080")
    assert found["fits"] == "no: it needs 15.2 GiB, and 14.4 may be used (0.90 of 16.0 GiB)"
    assert found["speed"] == "none, because it does not fit"
    assert re.match(
        r"it fits with --gpu-memory-utilization 0\.95 .*--precision balanced", " ".join(found["to improve"].split())
    )
    held = answer("gpt-oss-120b", "5090")["to improve"]
    assert re.search(r"cards that hold it: a100, h100, h20, rtxpro6000, gb10, .* and \d larger ones?", held)
    assert answer("gpt-oss-120b", "5090")["others"].startswith("no published figure known")


def test_auto_says_what_it_took() -> None:
    assert "auto stays with exact" in answer("gpt-oss-20b", "gb10", precision=make_precision("auto"))["precision"]
    demo = answer("demo", "4090", precision=make_precision("auto"), context=1024)
    assert demo["head"].endswith("precision fast")
    assert "auto takes fast; cost in quality: balanced 2.9e-05, fast 4.1e-04" in demo["precision"]


def test_a_described_card_gets_an_estimate_without_an_interval() -> None:
    spec = "sms=128,gbs=1008,gib=24,capability=8.9"
    found = answer("gpt-oss-20b", gpu_spec=spec)
    assert spec in found["head"].replace(" ", "")
    assert found["speed"].endswith("roofline estimate without an interval")
    assert "(" not in found["speed"]
    questions = (Question("gpt-oss-20b", gpu_spec=spec), Question("gpt-oss-20b", "4090"))
    estimate, known = (explain(question).asked for question in questions)
    assert estimate is not None
    assert known is not None
    assert estimate.low is None
    assert estimate.tok_s == pytest.approx(known.tok_s, rel=0.3)
    assert run("gpt-oss-20b", "--gpu-spec", "sms=84")[0] != 0


def test_several_ranks_count_their_sums() -> None:
    found = answer("gpt-oss-120b", "5090", tensor_parallel_size=4)
    assert found["head"].startswith("gpt-oss-120b on 4 x NVIDIA GeForce RTX 5090")
    assert "GiB on each card" in found["fits"]
    assert "72 sums over the link" in found["speed"]


def test_cards_are_compared() -> None:
    status, text = run(
        "gpt-oss-20b", "--gpu", "4080", "--gpu", "3090", "--gpu-spec", "sms=84,gbs=960,gib=32,capability=12.0"
    )
    assert status == 0
    rows = [line for line in text.splitlines() if " exact " in line]
    assert [re.split(r"  +", row)[0] for row in rows[:2]] == ["RTX 4080", "RTX 3090"]
    assert "does not fit" in rows[0]
    assert re.search(r"21\.6 +181 \(161-202\) +848 ms$", rows[1])
    assert len(rows) == 3
    assert "roofline estimate without an interval" in text
    assert run("gpt-oss-120b", "--gpu", "4080", "--gpu", "3090")[0] == 1


def test_precisions_are_compared_in_80_columns() -> None:
    reports = [explain(Question("gpt-oss-120b", "rtxpro6000", precision)) for precision in PRECISIONS.values()]
    lines = [render_markup(line).plain for line in compare_lines(reports)]
    assert max(map(len, lines)) <= 80
    assert [line.split()[4] for line in lines if line.startswith("RTX PRO 6000 Blackwell ")] == list(PRECISIONS)
    assert "cost in quality not measured for gpt-oss-120b" in " ".join(lines)
    status, text = run("gpt-oss-120b", "--gpu", "gb10", "--precision", "all", "--json")
    assert status == 0
    assert [(data["precision"], data["gpu"]) for data in json.loads(text)] == [
        (name, "NVIDIA GB10") for name in PRECISIONS
    ]


@pytest.mark.parametrize("option", [("--why",), ("--speculative", "ngram")])
def test_details_are_for_one_card(option: Sequence[str]) -> None:
    result = CliRunner().invoke(app, ["explain", "gpt-oss-20b", "--gpu", "h100", "--gpu", "h200", *option])
    assert "--why and --speculative explain one card in one precision" in str(result.exception)


def test_why_has_one_set_of_microseconds() -> None:
    """Those of the kernels, on which the choice rests; the step has shares."""
    text = run("gpt-oss-120b", "--gpu", "gb10", "--why")[1]
    assert "us a step" not in text
    assert re.search(r"share of a step: experts \d+%", " ".join(text.split()))


def test_no_speed_is_shown_for_a_cpu() -> None:
    """Estimates for a CPU only rank kernels."""
    status, text = run("demo")
    assert status == 0
    assert "not predicted for a CPU; --gpu NAME answers for a card" in text
    assert "a GPU: --gpu NAME says how fast" in text
    compared = run("demo", "--precision", "all")[1]
    assert compared.count("not predicted") == 3
    assert "tokens per second" not in text
