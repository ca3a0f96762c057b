"""The server's own histogram counts as Prometheus's does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from microscale.server.metrics import BETWEEN_TOKENS, Metrics


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
