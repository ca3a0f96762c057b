"""The server's own histogram counts as Prometheus's does; what the engine counts is shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from microscale.engine.output import Stats
from microscale.server.monitoring.metrics import BETWEEN_TOKENS, Metrics


@given(st.lists(st.floats(0, 20) | st.sampled_from(BETWEEN_TOKENS), max_size=20))
def test_gaps_between_tokens_are_counted_as_prometheus_does(gaps: list[float]) -> None:
    registry, metrics = CollectorRegistry(), Metrics("m", "x")
    truth = Histogram("x:inter_token_latency_seconds", "", ["model_name"], buckets=BETWEEN_TOKENS, registry=registry)
    metrics.between_tokens.observe_all(gaps)
    for gap in gaps:
        truth.labels("m").observe(gap)
    truth.labels("m")
    name = b"x:inter_token_latency_seconds_"
    ours, theirs = (
        [line for line in text.splitlines() if line.startswith(name) and b"_created" not in line]
        for text in (metrics.text(None), generate_latest(registry))
    )
    assert ours == theirs


def test_kernels_that_came_late_are_counted() -> None:
    metrics = Metrics("m", "x")
    text = metrics.text(Stats(0, 0, 0, 0, 0, {}, kernels_compiled_late=3, kernels_loaded_late=2)).decode()
    assert 'x:kernels_compiled_after_ready_total{model_name="m"} 3.0' in text
    assert 'x:kernels_loaded_after_ready_total{model_name="m"} 2.0' in text


def test_graphs_are_counted() -> None:
    metrics = Metrics("m", "x")
    stats = Stats(0, 0, 0, 0, 0, {}, graphs=70, graphs_waited_for=4, graph_stand_ins=9)
    lines = metrics.text(stats).decode().splitlines()
    assert "# TYPE x:cuda_graphs gauge" in lines
    assert 'x:cuda_graphs{model_name="m"} 70.0' in lines
    assert 'x:cuda_graphs_waited_for_total{model_name="m"} 4.0' in lines
    assert 'x:cuda_graph_stand_ins_total{model_name="m"} 9.0' in lines


def test_drafts_are_counted_by_place() -> None:
    metrics = Metrics("m", "x")
    drafted = Stats(
        0, 0, 0, 0, 0, {}, num_drafts=9, num_draft_tokens=14, num_accepted_tokens=8,
        drafted_per_pos=(9, 5), accepted_per_pos=(6, 2), draft_length=1.25,
    )  # fmt: skip
    lines = metrics.text(drafted).decode().splitlines()
    assert 'x:spec_decode_num_drafts_total{model_name="m"} 9.0' in lines
    assert 'x:spec_decode_num_draft_tokens_total{model_name="m"} 14.0' in lines
    assert 'x:spec_decode_num_accepted_tokens_total{model_name="m"} 8.0' in lines
    for name, counts in (("draft", (9.0, 5.0)), ("accepted", (6.0, 2.0))):
        for place, count in enumerate(counts):
            labels = f'model_name="m",position="{place}"'
            assert f"x:spec_decode_num_{name}_tokens_per_pos_total{{{labels}}} {count}" in lines
    assert 'x:spec_decode_draft_length{model_name="m"} 1.25' in lines
    assert "# TYPE x:spec_decode_draft_length gauge" in lines
    assert b"spec_decode" not in Metrics("m", "x").text(Stats(0, 0, 0, 0, 0, {}))
