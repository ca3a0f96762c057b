"""``prove --mutate``: faults in our kernels, and which of them the cases notice."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from microscale import settings
from microscale.cli import app
from microscale.errors import BadSetting
from microscale_lab.prove.command import run_mutants
from microscale_lab.prove.mutation import EQUIVALENT, INVALID, KILLED, SURVIVED, UNREACHED

pytestmark = pytest.mark.timeout(600)


def run(results: Path, sample: int) -> tuple[list[dict[str, Any]], str]:
    out = StringIO()
    run_mutants(
        results, gpu="gb10", op="drafts", sample=sample, seed=0, jobs=1, cache_dir=settings.load().cache_dir,
        console=Console(file=out, width=200),
    )  # fmt: skip
    return [json.loads(line) for line in results.read_text().splitlines()], out.getvalue()


def test_a_sample_is_tried_and_a_larger_one_goes_on_from_there(tmp_path: Path) -> None:
    results = tmp_path / "mutants.jsonl"
    first, _ = run(results, 4)
    assert len(first) == 4
    more, shown = run(results, 8)
    assert more[:4] == first
    assert len({each["key"] for each in more}) == 8
    assert {each["outcome"] for each in more} <= {KILLED, SURVIVED, EQUIVALENT, INVALID, UNREACHED}
    killed = [each for each in more if each["outcome"] == KILLED]
    assert len(killed) >= 4
    assert all(each["why"] and each["case"].startswith("drafts, ") and each["ran"] for each in killed)
    assert all(each["ran"] == 0 for each in more if each["outcome"] == EQUIVALENT)
    counts = [row for row in shown.splitlines() if row.startswith("| all | 8 |")]
    assert len(counts) == 2, "by operator and by module"


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    for options, said in (
        (["--gpu", "all"], "--mutate takes one card"),
        (["--gpu", "gb10", "--quick", "--run"], "--mutate works with"),
        (["--gpu", "gb10", "--sample", "0"], "at least one mutant is needed"),
    ):
        with pytest.raises(BadSetting, match=said):
            CliRunner().invoke(app, ["prove", "--mutate", str(tmp_path / "x"), *options], catch_exceptions=False)
    with pytest.raises(BadSetting, match="--sample, --seed and --host need --mutate"):
        CliRunner().invoke(app, ["prove", "--seed", "3"], catch_exceptions=False)


def test_code_that_launches_is_changed_and_put_back(tmp_path: Path) -> None:
    """A mutant of a function of Python runs wherever the function is called."""
    results = tmp_path / "mutants.jsonl"
    out = StringIO()
    run_mutants(
        results, gpu="gb10", op="drafts", sample=2, seed=0, quick=True, host=True, jobs=1,
        cache_dir=settings.load().cache_dir, console=Console(file=out, width=200),
    )  # fmt: skip
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(found) == 2
    assert {each["outcome"] for each in found} <= {KILLED, SURVIVED}
    assert all(each["function"].startswith("microscale.kernels.drafts.") and each["ran"] for each in found)
    assert not any(each["whole"] for each in found)
