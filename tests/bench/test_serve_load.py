"""The load of ``bench serve`` on a real server whose engine takes a known time a step: the figures must tell it."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from microscale.bench.serve_client import BenchFailed, StreamTimes
from microscale.bench.serve_figures import (
    FirstToken,
    Gaps,
    GraphChanges,
    ServerFigures,
    Slowest,
    Spread,
    as_json,
    table,
)
from microscale.bench.serve_load import FIRST_TOKENS, QUICK, LoadPlan, LoadRun, Requests, measure
from microscale.bench.serve_process import BenchServer
from support.live_server import Live, live

STEP_S = 0.06
STEP_MS = 1e3 * STEP_S
BUSY_MS = 5 * STEP_MS
"""By which a busy machine may delay what a process has to do."""
PLAN = replace(QUICK, prompt_lens=(16, 64), repeats=5, first_requests=8, stream_tokens=20, arrivals=6)


def server_of(running: Live, **plan: Any) -> BenchServer:
    port = urlsplit(running.address).port
    assert port is not None
    process = cast(Any, running.process)
    return BenchServer(port, 1.0, {"max_model_len": 4096, **plan}, process, running.log)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerFigures, int, str]]:
    """What was measured, the steps that a progress bar heard of, and the server's log."""
    log = tmp_path_factory.mktemp("serve") / "log"
    steps: list[int] = []
    with live(log, step_s=STEP_S, keys=[]) as running:
        result = measure(server_of(running), PLAN, 0, steps.append)
        yield result, sum(steps), log.read_text()


def told(log: str, prompt_tokens: int, completion_tokens: int) -> list[tuple[float, float]]:
    """Milliseconds to the first token and to the last of such requests, in their order, as the server's log has them.

    A busy machine delays the server and the benchmark alike: what the server saw is the truth here, and the step the
    least that it can be.
    """
    counts = f"prompt_tokens={prompt_tokens} .*completion_tokens={completion_tokens} "
    found = re.findall(counts + r".*first_token_ms=([\d.]+) total_ms=([\d.]+)", log)
    return [(float(first), float(total)) for first, total in found]


def test_first_tokens_are_those_of_the_engine(found: tuple[ServerFigures, int, str]) -> None:
    """A request comes while the engine is idle: its first step gives the first token, and a second one would show."""
    result, _, log = found
    assert [row.prompt_tokens for row in result.first_tokens] == [16, 64]
    for row in result.first_tokens:
        server = told(log, row.prompt_tokens, FIRST_TOKENS)[-PLAN.repeats :]
        p50 = median(first for first, _ in server)
        assert STEP_MS <= p50 < row.steady.p50 < p50 + BUSY_MS
        assert row.steady.p50 <= row.steady.p99 == row.steady.largest
        assert row.steady.count == PLAN.repeats
        assert row.after_ready_ms >= STEP_MS
    assert result.slowest is not None
    assert result.slowest.requests == PLAN.first_requests
    assert result.slowest.prompt_tokens in PLAN.all_lens
    assert result.slowest.times_steady >= max(row.after_ready_ms / row.steady.p50 for row in result.first_tokens)


def test_a_burst_shares_its_steps(found: tuple[ServerFigures, int, str]) -> None:
    """As the server saw the eight: each waits for the step that it comes in, or for one more."""
    result, _, log = found
    burst = result.burst
    assert burst is not None
    assert (burst.prompts, burst.prompt_tokens, burst.again.count) == (8, 64, 8)
    for spread in (burst.first, burst.again):
        assert STEP_MS < spread.p50 <= spread.largest
    again = told(log, PLAN.burst_len, FIRST_TOKENS)[-PLAN.repeats - PLAN.burst : -PLAN.repeats]
    p50 = median(first for first, _ in again)
    assert p50 < burst.again.p50 < p50 + BUSY_MS


def test_gaps_are_steps(found: tuple[ServerFigures, int, str]) -> None:
    result, _, log = found
    assert [(row.streams, row.arrivals) for row in result.gaps] == [(1, 0), (4, 0), (2, PLAN.arrivals)]
    one, four, busy = result.gaps
    streams = told(log, PLAN.stream_len, PLAN.stream_tokens)
    means = [(total - first) / (PLAN.stream_tokens - 1) for first, total in streams[:5]]
    arrived = [each for length in PLAN.prompt_lens for each in told(log, length, PLAN.arrival_tokens)]
    meanwhile = max((total - first) / (PLAN.arrival_tokens - 1) for first, total in arrived)
    for row, mean in ((one, means[0]), (four, max(means[1:])), (busy, meanwhile)):
        # The largest is no less than the mean, and the middle one not far above: most gaps are alike.
        assert STEP_MS / 2 < row.gaps.p50 < 2 * mean
        assert row.gaps.p50 <= row.gaps.p99 <= row.gaps.largest
    assert one.gaps.largest > 0.95 * means[0]
    # The first token begins the first gap. Where the machine is busy tokens come together now and then.
    for row, streams_of_it in ((one, 1), (four, 4)):
        most = streams_of_it * (PLAN.stream_tokens - 1)
        assert most / 2 < row.gaps.count <= most
        assert row.tokens_per_event is not None
        assert 1.0 <= row.tokens_per_event < 1.5
    assert busy.arrivals_first is not None
    assert busy.arrivals_first.count == PLAN.arrivals


def test_each_phase_tells_the_graphs_of_its_own(found: tuple[ServerFigures, int, str]) -> None:
    """The scripted engine captures one for each request, every second request waits for its own, and each runs three
    steps in others."""
    result, _, _ = found
    before = PLAN.first_requests + 2 * PLAN.burst + len(PLAN.all_lens) * PLAN.repeats
    for gaps, requests in zip(result.gaps, (1, 4, PLAN.running + PLAN.arrivals), strict=True):
        waited_for = (before + requests) // 2 - before // 2
        assert gaps.graphs == GraphChanges(before, requests, waited_for, 3 * requests)
        before += requests


def test_a_server_that_counts_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    load = LoadRun(BenchServer(1, 1.0, {"max_model_len": 4096}, cast(Any, None), Path()), PLAN, 0, lambda steps: None)
    gaps = Gaps(8, 100, Spread(4.0, 5.0, 6.0, 20), None)
    names = ("cuda_graphs", "cuda_graphs_waited_for_total", "cuda_graph_stand_ins_total")
    before, after = (
        "".join(f'x:{name}{{model_name="m"}} {count}.0\n' for name, count in zip(names, counts, strict=True)).encode()
        for counts in ((70, 4, 0), (72, 4, 9))
    )
    for texts, counts in (((before, after), GraphChanges(70, 2, 0, 9)), ((before, b""), None), ((b"", after), None)):
        told = iter(texts)
        monkeypatch.setattr(BenchServer, "get", lambda server, path, told=told: next(told))
        assert load._counted(lambda: gaps) == replace(gaps, graphs=counts)


def test_the_server_saw_what_was_planned(found: tuple[ServerFigures, int, str]) -> None:
    _, steps, log = found
    assert steps == PLAN.steps
    asked = [line for line in log.splitlines() if "route=/v1/completions" in line]
    for length in PLAN.all_lens:
        of_length = [line for line in asked if f"prompt_tokens={length} " in line]
        first_tokens = [line for line in of_length if f"completion_tokens={FIRST_TOKENS} " in line]
        assert len(first_tokens) >= PLAN.repeats + 1
    singles = len(PLAN.all_lens) * PLAN.repeats + PLAN.first_requests
    streams = sum(PLAN.streams) + PLAN.arrivals
    assert len([line for line in asked if "finish=length" in line]) == singles + 2 * PLAN.burst + streams


def test_floors_are_below_what_they_are_under(found: tuple[ServerFigures, int, str]) -> None:
    result, _, _ = found
    assert 0 < result.client_floor_ms < result.first_tokens[0].steady.p50
    assert 0 < result.http_floor_ms < result.first_tokens[0].steady.p50


def test_cached_prompts_are_told(found: tuple[ServerFigures, int, str]) -> None:
    """The scripted engine says that half of each prompt was cached."""
    result, _, _ = found
    assert result.cached_tokens > 0
    assert "prefix cache" in table("fresh", result)


def test_a_server_that_is_gone_is_told_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("the last words\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    server = BenchServer(port, 1.0, {"max_model_len": 4096}, cast(Any, None), log)
    with pytest.raises(BenchFailed, match=r"(?s)refused.*the last words"):
        measure(server, PLAN, 0, lambda steps: None)


def answer(prompt_tokens: int, completion_tokens: int) -> StreamTimes:
    return StreamTimes(0.0, 1.0, [1.0], 2.0, prompt_tokens, 0, completion_tokens)


def test_other_counts_than_asked_are_refused() -> None:
    requests = Requests(BenchServer(1, 1.0, {"max_model_len": 4096}, cast(Any, None), Path()), 0.0, 0)
    requests.check([answer(16, 2)], [(16, 2)])
    for wrong in (answer(17, 2), answer(16, 1)):
        with pytest.raises(BenchFailed, match="counted"):
            requests.check([wrong], [(16, 2)])


def test_prompts_that_do_not_fit_are_left_out() -> None:
    assert LoadPlan().fitting(1000).prompt_lens == (16, 64, 128, 256, 512)
    assert LoadPlan().fitting(10**5) == LoadPlan()
    with pytest.raises(BenchFailed, match="500 tokens"):
        LoadPlan().fitting(500)


def test_the_first_requests_hold_every_size() -> None:
    for plan in (LoadPlan(), QUICK):
        assert set(plan.prompt_lens) < set(plan.all_lens)
        assert len(plan.all_lens) <= plan.first_requests
        assert max(plan.all_lens) == max(plan.prompt_lens)


def test_percentiles() -> None:
    spread = Spread.of([each / 1e3 for each in range(200, 0, -1)])
    assert (spread.p50, spread.p99, spread.largest, spread.count) == pytest.approx((100.5, 198.0, 200.0, 200))
    assert Spread.of([0.003]) == Spread(3.0, 3.0, 3.0, 1)


def test_the_table_and_json_hold_the_figures() -> None:
    steady = Spread(4.0, 5.0, 6.0, 20)
    arrivals = Gaps(8, 100, steady, None, Spread(7.0, 8.0, 9.5, 100), GraphChanges(72, 21, 3, 54))
    result = ServerFigures(
        8.25,
        0.03,
        0.5,
        start_s={"server": 2.0, "load": 6.25},
        first_tokens=[FirstToken(16, 12.0, steady)],
        slowest=Slowest(100, 3.25, 77, 13.5),
        gaps=[Gaps(64, 0, Spread(9.0, 10.0, 11.0, 99), 1.5), arrivals],
        kernels_compiled_after_ready=3,
    )
    shown = table("warm", result)
    for part in (
        "kernel cache warm: ready after 8.25 s",
        "server process 2.00, weights and kernels 6.25",
        "kernels compiled after ready: 3",
        "3.25x the p50 of its size (prompt of 77, 13.50 ms)",
        "1.50 tokens an event",
        "8 streams, 100 arrive",
        "graphs: 72 before, 21 captured during it; 54 steps in stand-ins, 3 without a graph",
    ):
        assert part in shown
    assert [line.split() for line in shown.splitlines() if line.startswith("prompt of 16")] == [
        ["prompt", "of", "16", "4.00", "5.00", "6.00", "12.00", "3.0x"]
    ]
    assert "prefix cache" not in shown
    told = as_json({"model": "m"}, {"fresh": result})
    assert told["model"] == "m"
    [run] = cast(list[dict[str, Any]], told["runs"])
    assert run["cache"] == "fresh"
    assert run["first_tokens"][0]["steady"]["p99"] == 5.0
    assert run["gaps"][1]["arrivals_first"]["largest"] == 9.5
