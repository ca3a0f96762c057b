"""The simulation of many replicas: against closed forms, against what was measured, and against its own statistics."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from microscale.bench.scale import Cluster, Outcome, Routing, simulate
from microscale.bench.scale_replica import Gaps, Job, PrefixCache, Replica
from microscale.bench.scale_report import HEAD, Study, line, plot, run
from microscale.bench.scale_steps import Steps, measured_steps
from microscale.bench.scale_trace import Requests, make_requests
from microscale.cli.measure import bench
from microscale.errors import BadSetting
from microscale.integrations.prefix_routing import MAX_ENTRIES

SERVICE_S = 0.01
FIXED = Steps("fixed", (0.0,) * 2, (0.0, *[SERVICE_S * 1e6] * 64), 0.0, 0.0, 10**9, 1, 32)
"""A prompt takes one step of 10 ms, and its answer is its first token: service times are all the same."""


def poisson(rate: float, count: int, seed: int = 1) -> Requests:
    """Requests of one step each that share nothing."""
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
    ones = np.ones(count, dtype=np.int64)
    return Requests(arrivals, np.arange(count), 0 * ones, 8 * ones, 0 * ones, ones)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_replica_is_an_m_d_1_queue(load: float) -> None:
    """Mean wait of a queue with random arrivals and equal service times: rho / (2 (1 - rho)) services."""
    requests = poisson(load / SERVICE_S, 30_000)
    replica = Replica(FIXED, Gaps())
    waits = []
    jobs = [Job(i, i, at, 8, 0, 1) for i, at in enumerate(requests.arrival_s.tolist())]
    for job in jobs:
        while replica.ends_s < job.arrival_s:
            waits += [ended.first_s - ended.arrival_s - SERVICE_S for ended in replica.end_run()]
        replica.arrive(job, job.arrival_s)
    expected = load / (2 * (1 - load)) * SERVICE_S
    # The error of a mean over 30,000 correlated waits: about 5 % at the highest load.
    assert np.mean(waits) == pytest.approx(expected, rel=0.10)
    assert replica.busy_s / requests.arrival_s[-1] == pytest.approx(load, rel=0.02)


def test_random_routing_makes_every_replica_such_a_queue_and_choosing_helps() -> None:
    requests = poisson(8 * 0.7 / SERVICE_S, 20_000)
    random, load, prefix = (simulate(Cluster(FIXED, 8, each), requests) for each in Routing)
    # The median wait of M/D/1 at 0.7 is near 0.6 services; its busy share is the load, whatever the routing.
    for outcome in (random, load, prefix):
        assert outcome.busy == pytest.approx(0.7, rel=0.03)
        assert outcome.requests_per_s == pytest.approx(8 * 0.7 / SERVICE_S, rel=0.03)
    assert random.first_p99_s > 1.5 * load.first_p99_s > 1.5 * prefix.first_p99_s
    assert prefix.first_p50_s == pytest.approx(SERVICE_S)


@pytest.fixture(scope="module")
def steps_20b() -> Steps:
    return measured_steps("gpt-oss-20b")


# docs/benchmarks.md: table Decode, and the third of three sweeps (2048 tokens: as a graph), H200, tokens per second.
DECODE = {1: 735.0, 64: 12_289.0}
PREFILL = {128: 24_023.0, 512: 52_580.0, 1024: 70_788.0, 2048: 82_547.0}


@pytest.mark.parametrize("batch", DECODE)
def test_a_replica_decodes_as_fast_as_was_measured(steps_20b: Steps, batch: int) -> None:
    """A batch that is there at once: prompts of the row's context, then 256 tokens each."""
    context = {1: 128, 64: 512}[batch]
    gaps = Gaps()
    replica = Replica(steps_20b, gaps)
    for number in range(batch):
        replica.arrive(Job(number, number, 0.0, context, 0, 256), 0.0)
    first = last = 0.0
    jobs: list[Job] = []
    while replica.ends_s < math.inf:
        last = replica.ends_s
        jobs += replica.end_run()
    first = max(job.first_s for job in jobs)
    assert len(jobs) == batch
    # Those that began earlier have ended earlier; the full batch runs in between.
    assert batch / gaps.quantile(0.5) == pytest.approx(DECODE[batch], rel=0.10)
    assert last > first > 0


@pytest.mark.parametrize("tokens", PREFILL)
def test_a_prompt_takes_as_long_as_was_measured(steps_20b: Steps, tokens: int) -> None:
    requests = Requests(*(np.array([value]) for value in (0.0, 0, 0, tokens, 0, 4)))
    outcome = simulate(Cluster(steps_20b, 1, Routing.LOAD), requests)
    assert tokens / outcome.first_p50_s == pytest.approx(PREFILL[tokens], rel=0.10)


def test_requests_have_the_statistics_of_the_trace() -> None:
    """Counted from it: means of 12,035 and 343 tokens, 38.7 % followers with 14,046."""
    requests = make_requests(20.0, 0.0, 3600.0, 3)
    assert len(requests) / 3600 == pytest.approx(20.0, rel=0.05)
    assert requests.input_len.mean() == pytest.approx(12_035, rel=0.05)
    assert requests.output_len.mean() == pytest.approx(343, rel=0.05)
    follows = requests.turn > 0
    assert follows.mean() == pytest.approx(0.387, abs=0.02)
    assert requests.input_len[follows].mean() == pytest.approx(14_046, rel=0.05)
    assert (requests.shared_len <= requests.input_len).all()
    again = make_requests(20.0, 0.0, 3600.0, 3)
    assert (again.arrival_s == requests.arrival_s).all()
    assert len(make_requests(20.0, 0.0, 3600.0, 4)) != len(requests)


def test_routing_by_prefix_finds_more_and_answers_earlier(steps_20b: Steps) -> None:
    requests = make_requests(8 * 1.5, -200.0, 60.0, 5)  # from 2 on a replica is full, and routing by load takes over
    random, load, prefix = (simulate(Cluster(steps_20b, 8, each), requests) for each in Routing)
    assert prefix.cached > 2 * load.cached
    assert load.cached == pytest.approx(random.cached, abs=0.03)
    assert prefix.first_p50_s < 0.7 * load.first_p50_s < 0.7 * random.first_p50_s
    # With room for everything, nearly all that can be found is, within what came since the warm-up; with a quarter of
    # an H200's room, less.
    roomy, tight = (replace(steps_20b, cache_tokens=room) for room in (10**12, steps_20b.cache_tokens // 4))
    most = simulate(Cluster(roomy, 1, Routing.PREFIX), requests)
    all_kept, some_kept = (simulate(Cluster(each, 8, Routing.PREFIX), requests) for each in (roomy, tight))
    assert some_kept.cached < prefix.cached <= all_kept.cached <= most.cached
    # A table that forgets within a second, and eight routers that know nothing of each other: homes still find most.
    for cluster in (Cluster(steps_20b, 8, Routing.PREFIX, 1, 64), Cluster(steps_20b, 8, Routing.PREFIX, 8)):
        assert 2 * load.cached < simulate(cluster, requests).cached < prefix.cached
    assert simulate(Cluster(steps_20b, 8, Routing.PREFIX), requests) == prefix, "the same seed, another outcome"


def test_the_cache_keeps_what_was_used_last() -> None:
    def found(session: int) -> int:
        return cache.find(Job(0, session, 0.0, 10_000, 9_000, 1))

    cache = PrefixCache(3000)
    assert found(1) == 0
    for session, tokens in ((1, 1000), (2, 1200), (1, 1500), (3, 300)):
        cache.keep(session, tokens, 0.0)
    assert [found(session) for session in (1, 2, 3, 4)] == [1488, 1200, 512, 512], "whole pages; all share 512"
    cache.keep(3, 700, 0.0)
    assert [found(session) for session in (1, 2, 3)] == [1488, 512, 688], "the second was the least recently used"
    cache.keep(4, 100, 2900.0)
    assert [found(session) for session in (1, 3)] == [512, 512], "what runs takes the room of what is kept"
    assert cache.find(Job(0, 4, 0.0, 16, 16, 1)) == 0, "one token at least is computed"


def test_more_sequences_than_fit_wait() -> None:
    """Two at a time: the third begins when the first has ended."""
    steps = Steps("two", (0.0, 1e4, 1e4), (0.0, *[1e4] * 64), 0.0, 0.0, 10**9, 2, 32)
    requests = Requests(np.zeros(3), np.arange(3), *(np.full(3, n) for n in (0, 8, 0, 5)))
    outcome = simulate(Cluster(steps, 1, Routing.LOAD), requests)
    # First tokens at 10 and 20 ms. The first answer's four other tokens end at 50 ms, and 10 ms later the third begins.
    assert (outcome.first_p50_s, outcome.first_p99_s) == pytest.approx((0.02, 0.0592), rel=1e-3)


def test_the_report_says_what_came_out(tmp_path: Path) -> None:
    picture = tmp_path / "scale.svg"
    options = {"replicas": "1,2", "rate": "2", "seconds": "5", "warm-up": "5", "routing": "load,prefix", "price": "2"}
    arguments = ["scale", *(word for name, value in options.items() for word in (f"--{name}", value))]
    shown = CliRunner().invoke(bench, [*arguments, "--plot", str(picture)])
    assert shown.exit_code == 0, shown.output
    assert len([row for row in shown.output.splitlines() if " load " in row or " prefix " in row]) == 4
    texts = [element.text for element in ElementTree.parse(picture).iter() if element.tag.endswith("text")]
    assert {"replicas", "load", "prefix", "1", "2"} <= set(texts)
    found = CliRunner().invoke(bench, [*arguments, "--json"])
    rows = json.loads("[" + found.output.replace("}\n{", "},{") + "]")
    assert [row["num_replicas"] for row in rows] == [1, 1, 2, 2]
    outcome = Outcome(10, "prefix", 25.0, 8000.0, 0.1, 3.0, 0.004, 0.05, 0.2, 1.0, 1.0, 0.35)
    assert line(outcome, 2.0).split()[-2:] == ["0.350", "0.70"]
    assert len(line(outcome, 2.0)) == len(HEAD.splitlines()[0])
    assert "Nothing to join" in plot([outcome], "one")


def test_wrong_options_are_refused(steps_20b: Steps) -> None:
    for wrong in ({"rates": (0.0,)}, {"replicas": (0,)}, {"seconds": 0.0}, {"num_fronts": 0}):
        with pytest.raises(BadSetting):
            list(run(replace(Study(steps_20b), **wrong)))
    with pytest.raises(BadSetting, match="does not fit"):
        measured_steps("gpt-oss-120b", "rtx4090")
    with pytest.raises(BadSetting, match="no preset"):
        measured_steps("nothing")
    assert Study(steps_20b).table_entries == MAX_ENTRIES
