"""Graphs: how batches are filled up, what is captured, in which parts, and what cannot be."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from microscale.engine.step.graphs import (
    GRAPH_ITSELF,
    LEAST_GRAPH_MEMORY,
    MOST_PARTS,
    Graphs,
    after_layers,
    graph_memory,
    graph_size,
    table_width,
    whole,
)
from microscale.hardware import known
from microscale.models.decoder import Parted
from support.paper_graphs import on_paper

CUDA = torch.device("cuda")


def made(*, waits: bool = False) -> Graphs:
    return Graphs(CUDA, lambda tokens: None, enabled=True, waits=waits)


def names(name: str, layers: int) -> list[str]:
    return [f"{name}{layer}" for layer in range(layers)]


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
    paper = on_paper(monkeypatch)
    graphs = Graphs(CUDA, lambda tokens: "it reads on the host" if tokens > 1 else None, enabled=True)
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            assert graphs.run("two", 2, partial(paper.layers, "t", 1)) == "t"
    assert (paper.ran, paper.captures) == (["t0"] * 4, [])
    assert [record.getMessage() for record in caplog.records] == [
        "Steps of 2 tokens run without a CUDA graph: it reads on the host."
    ]
    assert [graphs.run("one", 1, partial(paper.layers, "o", 1)) for _ in range(3)] == ["o"] * 3
    # The first of another kind of key runs as it is: it makes what is kept between runs.
    assert [graphs.run((1, 2), 1, partial(paper.layers, "k", 1)) for _ in range(2)] == ["k"] * 2
    assert paper.captures == [["o0"], ["k0"]]
    assert paper.ran == [*["t0"] * 4, *["o0"] * 3, *["k0"] * 2]
    assert len(graphs) == 2


def test_graphs_have_a_budget(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    paper = on_paper(monkeypatch)
    graphs = made()
    graphs._bytes = LEAST_GRAPH_MEMORY + 1
    with caplog.at_level(logging.INFO):
        assert [graphs.run("key", 1, whole(lambda: 7)) for _ in range(4)] == [7] * 4
    assert [record.getMessage() for record in caplog.records] == ["0 graphs take 512 MiB, and no more are captured."]
    # There is nothing left to do ahead of time either.
    assert graphs.capture("key", 1, partial(paper.layers, "k", 3), lambda: True)
    assert not paper.captures


def test_large_cards_have_room_for_more_graphs() -> None:
    """A 64th of the card. With 512 MiB an H200 stopped after 109 graphs, and mixed steps ran without."""
    assert graph_memory(known("rtx5090")) == LEAST_GRAPH_MEMORY
    assert graph_memory(known("h200")) == known("h200").memory_bytes // 64 > 300 * 5 * 2**20


def test_nothing_is_captured_on_a_cpu_or_where_graphs_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    paper = on_paper(monkeypatch)
    for device, enabled in (("cpu", True), ("cuda", False)):
        graphs = Graphs(torch.device(device), lambda tokens: None, enabled=enabled)
        assert [graphs.run("key", 1, whole(lambda: 7)) for _ in range(3)] == [7] * 3
        assert graphs.capture("other", 1, whole(lambda: 7), lambda: False)
    assert not paper.captures


def test_first_runs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a kind, and each capture: what they take says nothing of the next."""
    on_paper(monkeypatch)
    graphs = Graphs(CUDA, lambda tokens: "too many" if tokens > 8 else None, enabled=True)
    counts = []
    for key, tokens in (("a", 1), ("a", 1), ("a", 1), ("b", 1), ("b", 1), ("c", 9), ("c", 9), ((1,), 1)):
        graphs.run(key, tokens, whole(lambda: "as it is"))
        counts.append(graphs.first_runs)
    assert counts == [1, 2, 2, 3, 3, 3, 3, 4]


def test_a_capture_is_left_behind_a_layer_and_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was captured is kept; other keys are captured and run meanwhile. Nothing is run before it is wanted."""
    paper = on_paper(monkeypatch)
    graphs = made()
    graphs.run("x", 1, partial(paper.layers, "x", 2))
    task = partial(paper.layers, "k", 7)
    assert not graphs.capture("k", 1, task, after_layers(3))
    assert len(graphs) == 0
    graphs.run("x", 1, partial(paper.layers, "x", 2))
    assert not graphs.capture("k", 1, task, after_layers(2))
    assert graphs.capture("k", 1, task, after_layers(100))
    assert graphs.capture("k", 1, task, lambda: pytest.fail("captured again"))
    assert paper.captures == [names("k", 3), names("x", 2), ["k3", "k4"], ["k5", "k6"]]
    assert paper.ran == names("x", 2) * 2
    assert (len(graphs), graphs.waited_for, graphs.first_runs) == (2, 1, 5)
    paper.ran.clear()
    for _ in range(2):
        assert graphs.run("k", 1, lambda: pytest.fail("captured again")) == "k"
    assert paper.ran == names("k", 7) * 2
    assert graphs.waited_for == 1


def test_who_wants_what_is_half_captured_has_the_first_half_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    paper = on_paper(monkeypatch)
    graphs = made()
    graphs.run("x", 1, whole(lambda: None))
    task = partial(paper.layers, "k", 5)
    graphs.capture("k", 1, task, after_layers(2))
    assert graphs.run("k", 1, task) == "k"
    assert paper.captures == [["k0", "k1"], ["k2", "k3", "k4"]]
    assert paper.ran == names("k", 5)
    assert (len(graphs), graphs.waited_for) == (1, 1)


def test_a_capture_that_is_left_too_often_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    paper = on_paper(monkeypatch)
    graphs = made()
    graphs.run("x", 1, whole(lambda: None))
    task = partial(paper.layers, "k", MOST_PARTS + 4)
    for _ in range(MOST_PARTS):
        assert not graphs.capture("k", 1, task, after_layers(1))
    assert graphs.capture("k", 1, task, after_layers(100))
    graphs.run("k", 1, task)
    assert paper.captures[-1] == paper.ran == names("k", MOST_PARTS + 4)


def test_work_that_fails_in_a_capture_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    paper = on_paper(monkeypatch)
    graphs = made()
    graphs.run("x", 1, whole(lambda: None))
    fails = [True]

    def task() -> Parted[str]:
        yield from paper.layers("a", 3)
        if fails[0]:
            raise ValueError("out of memory")
        return "k"

    assert not graphs.capture("k", 1, task, after_layers(1))
    with pytest.raises(ValueError, match="out of memory"):
        graphs.run("k", 1, task)
    fails.clear()
    fails.append(False)
    paper.ran.clear()
    assert graphs.run("k", 1, task) == "k"
    assert paper.ran == names("a", 3)


def test_sizes_are_those_that_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On several ranks those that each of them has tried, with or without success: their steps have the same sizes."""
    paper = on_paper(monkeypatch)

    def refused() -> str:
        raise RuntimeError("CUDA error: out of memory")

    for graphs, expected in ((made(), ["a"]), (made(waits=True), ["a", "refused", "b"])):
        assert not graphs.sizes(str)
        for key in ("a", "a"):
            graphs.run(key, 1, partial(paper.layers, key, 2))
        assert graphs.capture("refused", 1, whole(refused), lambda: False)
        graphs.run("b", 1, partial(paper.layers, "b", 2))
        graphs.run(7, 1, partial(paper.layers, "number", 2))
        assert graphs.sizes(str) == expected
        assert [key for key in ("a", "refused", "b", "c") if key in graphs] == expected
        assert [key for key in graphs._graphs if isinstance(key, str)] == ["a"]


def test_what_other_processes_take_meanwhile_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver tells what is free on the whole GPU. A server whose neighbour started would capture no more."""
    free, reserved = [2**36], [2**30]

    class Graph:
        def capture_begin(self, pool: object) -> None: ...

        def capture_end(self) -> None:
            free[0] -= taken
            reserved[0] += of_torch

        def pool(self) -> str:
            return "a pool"

    cuda = torch.cuda
    monkeypatch.setattr(cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(cuda, "mem_get_info", lambda: (free[0], 2**37))
    monkeypatch.setattr(cuda, "memory_reserved", lambda: reserved[0])
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr("microscale.engine.step.graphs._capture_stream", lambda index: None)
    graphs = made()
    graphs._memory = "a pool"
    mib = 2**20
    for taken, of_torch, counted in (
        (5 * mib, 0, 5 * mib),
        (45 * mib, 40 * mib, 45 * mib),
        (9000 * mib, 40 * mib, 40 * mib + GRAPH_ITSELF),
        (9000 * mib, -500 * mib, GRAPH_ITSELF),
        (-9000 * mib, 40 * mib, 0),
    ):
        before = graphs._bytes
        assert graphs.capture(("key", taken, of_torch), 1, whole(lambda: None), lambda: False)
        assert graphs._bytes - before == counted
    assert not graphs._failed


@pytest.mark.parametrize("beside", [False, True])
def test_a_capture_that_the_driver_refuses_is_the_last(
    beside: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step gives what it gives without a graph; what was captured before goes on."""
    paper = on_paper(monkeypatch)
    graphs = made()
    graphs.run("x", 1, whole(lambda: None))
    assert graphs.run("before", 1, partial(paper.layers, "b", 2)) == "b"
    refusals = iter([True])

    def task() -> Parted[str]:
        for layer in range(3):
            if layer == 1 and next(refusals, False):
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore of it")
            paper.launch(f"k{layer}")
            yield
        return "k"

    paper.ran.clear()
    with caplog.at_level(logging.WARNING):
        if beside:
            assert graphs.capture("k", 1, task, after_layers(100))  # nothing is left to capture
        for _ in range(2):
            assert graphs.run("k", 1, task) == "k"
    assert paper.ran == names("k", 3) * 2
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().endswith("operation not permitted when stream is capturing")
    graphs.run("before", 1, partial(paper.layers, "b", 2))
    assert paper.ran[-2:] == names("b", 2)
    assert len(graphs) == 1
