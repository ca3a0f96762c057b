"""``bench serve --request-rate``: random arrivals, on a real server whose engine takes a known time a step."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from microscale.bench.serve_client import BenchFailed
from microscale.bench.serve_process import BenchServer
from microscale.bench.serve_rate import RatePlan, as_json, measure, table
from microscale.cli.bench_serve import parse_rates
from microscale.errors import BadSetting
from support.live_server import live

STEP_S = 0.02


def gaps(plan: RatePlan, rate: float) -> list[float]:
    at = list(plan.arrivals(rate, random.Random(1)))
    return [after - before for before, after in pairwise(at)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_asked_rate_and_burstiness(burstiness: float) -> None:
    found = gaps(RatePlan((10.0,), num_prompts=20_000, burstiness=burstiness), 10.0)
    assert mean(found) == pytest.approx(0.1, rel=0.05)
    assert pstdev(found) / mean(found) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_without_a_rate_all_arrive_at_once() -> None:
    assert set(gaps(RatePlan((math.inf,), num_prompts=50), math.inf)) == {0.0}


def test_lengths_vary_both_ways() -> None:
    plan, chooser = RatePlan((1.0,), input_len=100, output_len=40, range_ratio=0.5), random.Random(0)
    prompts, answers = zip(*(plan.size(chooser) for _ in range(2000)), strict=True)
    assert (min(prompts), max(prompts), min(answers), max(answers)) == (50, 150, 20, 60)
    assert mean(prompts) == pytest.approx(100, rel=0.03)
    assert {RatePlan((1.0,)).size(chooser) for _ in range(9)} == {(512, 128)}


def test_a_server_is_measured_at_each_rate(tmp_path: Path) -> None:
    plan = RatePlan((20.0, math.inf), num_prompts=16, input_len=16, output_len=6, range_ratio=0.25)
    advanced: list[int] = []
    with live(tmp_path / "log", step_s=STEP_S, keys=[]) as running:
        port = urlsplit(running.address).port
        assert port is not None
        server = BenchServer(port, 1.0, {"max_model_len": 64}, cast(Any, running.process), running.log)
        slow, fast = measure(server, plan, 0, advanced.append)
        with pytest.raises(BenchFailed, match="takes 64 tokens, and a request may have 82; lower --input-len"):
            measure(server, RatePlan((1.0,), num_prompts=2, input_len=60, output_len=22), 0, advanced.append)
    assert advanced == [1, 1]
    arriving = list(plan.arrivals(20.0, random.Random(0)))[-1]
    assert slow.requests_s < 16 / (0.5 * arriving)
    assert slow.requests_s < fast.requests_s, "all at once share their steps"
    for row in (slow, fast):
        assert row.first.count == 16
        assert row.first.p50 >= 1e3 * STEP_S
        assert row.gaps.p50 >= 0.8e3 * STEP_S
        assert row.output_tok_s == pytest.approx(6 * row.requests_s, rel=0.15)
        assert 0 < row.client_busy < 1.5
    assert len(table(plan, [slow, fast]).splitlines()) == 4
    written = json.loads(json.dumps(as_json({"model": "m"}, plan, {"warm": [slow, fast]}), allow_nan=False))
    assert written["plan"]["rates"] == [20.0, None]
    assert [row["rate"] for row in written["runs"][0]["rates"]] == [20.0, None]


def test_rates_are_read() -> None:
    assert parse_rates("4,8.5,inf") == (4.0, 8.5, math.inf)
    for wrong in ("", "0", "-1", "fast", "nan"):
        with pytest.raises(BadSetting, match="--request-rate"):
            parse_rates(wrong)
