"""Graphs: how batches are filled up, what is captured, and what cannot be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from microscale.engine.step.graphs import LEAST_GRAPH_MEMORY, Graphs, graph_memory, graph_size, table_width
from microscale.hardware import known


def test_graphs_are_hardly_padded_and_large_batches_share_them() -> None:
    for rows in range(1, 1025):
        size = graph_size(rows)
        assert size == rows if rows <= 64 else rows <= size <= rows * 17 / 16
        assert graph_size(size) == size
    assert len({graph_size(rows) for rows in range(65, 1025)}) == 64


def test_a_table_has_one_of_two_widths() -> None:
    assert [table_width(longest, 16, 8192) for longest in (1, 2048, 2049, 131072)] == [128, 128, 8192, 8192]
    assert {table_width(longest, 16, 100) for longest in (1, 1600)} == {100}


def test_what_no_graph_holds_runs_as_it_is(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every time, and the reason is told once; other sizes are captured."""
    runs: list[int] = []
    replayed: list[object] = []

    def capture(graphs: Graphs, key: Hashable, work: Callable[[], object]) -> None:
        graph: Any = SimpleNamespace(replay=lambda: replayed.append(key))
        graphs._graphs[key] = graph, "captured"

    monkeypatch.setattr(Graphs, "_capture", capture)
    graphs = Graphs(torch.device("cuda"), lambda tokens: "it reads on the host" if tokens > 1 else None, enabled=True)

    def work() -> str:
        runs.append(1)
        return "logits"

    with caplog.at_level(logging.INFO):
        for _ in range(4):
            assert graphs.run("two", 2, work) == "logits"
    assert (len(runs), replayed) == (4, [])
    assert [record.getMessage() for record in caplog.records] == [
        "Steps of 2 tokens run without a CUDA graph: it reads on the host."
    ]
    assert [graphs.run("one", 1, work) for _ in range(2)] == ["captured"] * 2
    # The first of another kind of key runs as it is: it makes what is kept between runs.
    assert [graphs.run((1, 2), 1, work) for _ in range(2)] == ["logits", "captured"]
    assert replayed == ["one", "one", (1, 2)]


def test_graphs_have_a_budget(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graphs, "_capture", lambda graphs, key, work: pytest.fail("captured"))
    graphs = Graphs(torch.device("cuda"), lambda tokens: None, enabled=True)
    graphs._bytes = LEAST_GRAPH_MEMORY + 1
    with caplog.at_level(logging.INFO):
        assert [graphs.run("key", 1, lambda: 7) for _ in range(4)] == [7] * 4
    assert [record.getMessage() for record in caplog.records] == ["0 graphs take 512 MiB, and no more are captured."]


def test_large_cards_have_room_for_more_graphs() -> None:
    """A 64th of the card. With 512 MiB an H200 stopped after 109 graphs, and mixed steps ran without."""
    assert graph_memory(known("rtx5090")) == LEAST_GRAPH_MEMORY
    assert graph_memory(known("h200")) == known("h200").memory_bytes // 64 > 300 * 5 * 2**20


def test_nothing_is_captured_on_a_cpu_or_where_graphs_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graphs, "_capture", lambda graphs, key, work: pytest.fail("captured"))
    for device, enabled in (("cpu", True), ("cuda", False)):
        graphs = Graphs(torch.device(device), lambda tokens: None, enabled=enabled)
        assert [graphs.run("key", 1, lambda: 7) for _ in range(3)] == [7] * 3


def test_first_runs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a kind, and each capture: what they take says nothing of the next."""

    def capture(graphs: Graphs, key: Hashable, work: Callable[[], object]) -> None:
        graph: Any = SimpleNamespace(replay=lambda: None)
        graphs._graphs[key] = graph, "captured"

    monkeypatch.setattr(Graphs, "_capture", capture)
    graphs = Graphs(torch.device("cuda"), lambda tokens: "too many" if tokens > 8 else None, enabled=True)
    counts = []
    for key, tokens in (("a", 1), ("a", 1), ("a", 1), ("b", 1), ("b", 1), ("c", 9), ("c", 9), ((1,), 1)):
        graphs.run(key, tokens, lambda: "as it is")
        counts.append(graphs.first_runs)
    assert counts == [1, 2, 2, 3, 3, 3, 3, 4]
