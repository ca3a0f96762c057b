"""Graphs: what is captured, what stands in for it, what cannot be captured, and how sizes are chosen."""

from __future__ import annotations

import logging
import random
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import pytest
import torch

from microscale.engine.graph_sizes import (
    EVERY_BUCKET_TO,
    FIRST_TOKENS,
    LARGE,
    GraphSizes,
    buckets,
    decode_key,
    graph_size,
    kernel_ends,
    plain_buckets,
    table_width,
    tail_key,
    verify_key,
)
from microscale.engine.graphs import (
    GRAPH_ITSELF,
    LEAST_GRAPH_MEMORY,
    MAX_PADDING,
    SMALL,
    Graphs,
    cost,
    graph_memory,
    holds,
    kind_of,
)
from microscale.engine.limits import PROMPT_GRAPH_TOKENS, SHORT_CONTEXT
from microscale.hardware import known
from microscale.models.families import PRESETS
from microscale.models.recorded import Step, kernels_by_tokens
from microscale.planning.ops import Activations, Ops, Preference
from support.paper_graphs import on_paper

CUDA = torch.device("cuda")
A, B, C = (decode_key(rows, 4) for rows in (1, 2, 3))


def made(*, waits: bool = False, most: int = 1000) -> Graphs:
    return Graphs(CUDA, lambda tokens: "it is too large" if tokens > most else None, enabled=True, waits=waits)


def body(tokens: int, sequences: int, pages: int = 4) -> Step:
    return Step(tokens, sequences, tokens, pages, rows=0)


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_steps_are_hardly_padded() -> None:
    for rows in range(1, 1025):
        size = graph_size(rows)
        assert size == rows if rows <= 64 else rows <= size <= rows * 17 / 16
        assert graph_size(size) == size
    ends = plain_buckets(1024)
    for tokens in range(1, 1025):
        end = next(end for end in ends if end >= tokens)
        assert end <= 1.12 * tokens
        assert end == tokens or tokens > EVERY_BUCKET_TO
    assert len(ends) < 64
    assert all(end % 8 == 0 for end in ends if end > 64)
    assert all(plain_buckets(most)[-1] == most for most in (1, 7, 16, 17, 100, 2048))
    assert [table_width(longest, 16, 8192) for longest in (1, 2048, 2049, 131072)] == [128, 128, 8192, 8192]
    assert {table_width(longest, 16, 100) for longest in (1, 1600)} == {100}


def sizes_of(name: str, card: str, max_sequences: int, draft_tokens: int = 0) -> GraphSizes:
    kernels = kernels_by_tokens(PRESETS[name], Ops(known(card), Activations.BF16, Preference()), 16, 128)
    ends = buckets(PROMPT_GRAPH_TOKENS, kernels)
    # Buckets end where kernels change: sizes that the search did not look at run those of their bucket.
    for low, high in pairwise(ends):
        if high <= 256 and high - low > 1:
            assert kernels(low + 1) == kernels(high), (low, high)
    rows = graph_size(max_sequences * (1 + draft_tokens) + 64)
    return GraphSizes(
        16, 8192, max_sequences, max_sequences, draft_tokens, rows, rows, ends, kernel_ends(ends, kernels)
    )


def test_what_every_step_needs_is_captured_first() -> None:
    """The memory for graphs may end at any key: one sequence must have its graphs, and results lie in one place."""
    first = sizes_of("gpt-oss-20b", "h200", 256, draft_tokens=7).first()
    kinds = {kind: [key for key in first if kind(key)] for kind in (is_body, is_tail, is_verify, is_decode)}
    assert first[:4] == [min(keys, key=numbers) for keys in kinds.values()]
    assert first[4:8] == [max(keys, key=numbers) for keys in kinds.values()]
    widest = [key.rows or key.tokens for key in first[5:8]]
    assert widest == sorted(widest, reverse=True), "results of later kinds fit into those before"


def numbers(key: Step) -> tuple[int, int]:
    return key.tokens, key.sequences


def is_body(key: Step) -> bool:
    return key.rows == 0


def is_tail(key: Step) -> bool:
    return bool(key.rows)


def is_verify(key: Step) -> bool:
    return key.verify


def is_decode(key: Step) -> bool:
    return key.rows is None and not key.verify


@pytest.mark.parametrize(
    ("name", "card", "max_sequences"),
    [("gpt-oss-20b", "h200", 1), ("gpt-oss-20b", "h200", 64), ("gemma-4-26b-a4b", "gb10", 256)],
)
def test_every_step_fits_into_what_is_captured_first(name: str, card: str, max_sequences: int) -> None:
    """Steps of up to 1024 tokens with short contexts before "ready", with so much padding at most; a prompt alone with
    the kernels of its own size."""
    sizes = sizes_of(name, card, max_sequences, draft_tokens=3)
    kernels = kernels_by_tokens(PRESETS[name], Ops(known(card), Activations.BF16, Preference()), 16, 128)
    first, later = sizes.first(), sizes.later()
    assert len(set(first)) == len(first) <= 110
    assert not set(first) & set(later)
    assert len(set(later)) == len(later)

    def smallest(wanted: Step, counts: list[int]) -> Step:
        of_kind = sorted((key for key in first if kind_of(key) == kind_of(wanted)), key=cost)
        return next(key for key in of_kind if holds(key, counts, wanted.pages))

    for rows in range(1, max_sequences + 1):
        wanted = decode_key(rows, 128)
        assert smallest(wanted, [1] * rows).tokens <= (rows if rows <= 8 else max(1.34 * rows, 1))
        assert smallest(decode_key(rows, 8192), [1] * rows).tokens <= 8 * rows
    for tokens in range(1, LARGE + 1):
        end = next(end for end in sizes.buckets if end >= tokens)
        alone = smallest(body(end, 2, 128), [tokens])
        assert alone.tokens <= max(1.7 * tokens, 1.7 * FIRST_TOKENS)
        if tokens >= FIRST_TOKENS:
            assert kernels(alone.tokens) == kernels(end)
        many = min(tokens, max_sequences)
        if many > 1:
            counts = [1] * (many - 1) + [tokens - many + 1]
            sequences = next(size for size in sizes.body_sequences if size > many)
            assert smallest(body(end, sequences, 128), counts).tokens <= max(2.3 * tokens, 2.3 * 2 * FIRST_TOKENS)
    for rows in range(1, max_sequences + 1):
        assert smallest(tail_key(rows, 128), [1] * rows).tokens <= 2 * rows
    chooser = random.Random(max_sequences)
    for _ in range(200):
        counts = [2, *(chooser.randint(1, 4) for _ in range(chooser.randrange(max_sequences)))]
        wanted = verify_key(counts, 128)
        assert holds(wanted, counts, 128)
        assert smallest(wanted, counts).tokens <= max(MAX_PADDING * sum(counts), SMALL)
    # What is captured later completes it: all sizes of bodies, decoding and tails in both widths.
    every = {*first, *later}
    bodies = {body(end, size, pages) for end in sizes.buckets for size in sizes.body_sequences for pages in (128, 8192)}
    assert bodies <= every
    assert {decode_key(rows, pages) for rows in range(1, max_sequences + 1) for pages in (128, 8192)} <= every


# ---- captures --------------------------------------------------------------------------------------------------------


def test_the_first_of_a_kind_is_launched_the_others_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run makes what is kept between runs. ``first_runs`` counts what was slow."""
    paper = on_paper(monkeypatch)
    graphs = made()
    counts = []
    for key, name in ((A, "a"), (A, "a"), (A, "a"), (B, "b"), (B, "b"), (body(9, 2), "p"), (body(9, 2), "p")):
        assert graphs.run(key, partial(paper.launch, name)) == name
        counts.append(graphs.first_runs)
    assert counts == [1, 2, 2, 3, 3, 4, 5]
    assert paper.captures == [["a"], ["b"], ["p"]]
    assert paper.ran == ["a", "a", "a", "b", "b", "p", "p"]
    assert (len(graphs), graphs.waited_for) == (3, 3)


@pytest.mark.parametrize(("device", "enabled"), [("cpu", True), ("cuda", False)])
def test_nothing_is_captured_on_a_cpu_or_where_graphs_are_off(
    device: str, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper = on_paper(monkeypatch)
    graphs = Graphs(torch.device(device), lambda tokens: None, enabled=enabled)
    assert [graphs.run(A, lambda: 7) for _ in range(3)] == [7] * 3
    assert not graphs.capture(B, lambda: 7)
    graphs.stand_in = True
    assert graphs.pick(B, [1, 1]) == B
    assert not paper.captures
    assert not graphs.missed


def test_what_no_graph_holds_is_launched(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every time, and the reason is logged once; smaller sizes are captured."""
    paper = on_paper(monkeypatch)
    graphs = made(most=1)
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            assert graphs.run(B, partial(paper.launch, "b")) == "b"
    assert (paper.ran, paper.captures) == (["b"] * 4, [])
    assert [record.getMessage() for record in caplog.records] == [
        "Steps of 2 tokens run without a CUDA graph: it is too large."
    ]
    graphs.run(A, partial(paper.launch, "a"))
    assert paper.captures == [["a"]]


def test_graphs_have_a_budget(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    paper = on_paper(monkeypatch)
    graphs = made()
    graphs._bytes = LEAST_GRAPH_MEMORY + 1
    with caplog.at_level(logging.INFO):
        assert [graphs.run(A, lambda: 7) for _ in range(4)] == [7] * 4
    assert [record.getMessage() for record in caplog.records] == ["0 graphs take 512 MiB, and no more are captured."]
    assert graphs.is_full
    assert not paper.captures
    assert graph_memory(known("h200")) == known("h200").memory_bytes // 64 > 300 * 5 * 2**20


@pytest.mark.parametrize("waits", [False, True])
def test_a_capture_that_the_driver_refuses_is_the_last(
    waits: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step gives what it gives without a graph, and what was captured before goes on. On several ranks the size
    counts as captured: another rank may have it, and all must pick the same."""
    paper = on_paper(monkeypatch)
    graphs = made(waits=waits)
    refusals = iter([True])

    def work() -> str:
        if next(refusals, False):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore of it")
        return paper.launch("b")

    for _ in range(2):
        graphs.run(A, partial(paper.launch, "a"))
    with caplog.at_level(logging.WARNING):
        assert [graphs.run(B, work) for _ in range(2)] == ["b", "b"]
    assert [record.getMessage().rpartition(" slower. ")[2] for record in caplog.records] == [
        "CUDA error: operation not permitted when stream is capturing"
    ]
    graphs.run(A, partial(paper.launch, "a"))
    assert paper.ran == ["a", "a", "b", "b", "a"]
    assert len(graphs) == 1
    assert graphs.is_full is not waits
    graphs.capture(C, partial(paper.launch, "c"))
    assert [key in graphs for key in (A, B, C)] == [True, waits, waits]


def test_other_errors_of_the_work_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    on_paper(monkeypatch)
    graphs = made()
    graphs.run(A, lambda: None)

    def fails() -> None:
        raise ValueError("out of pages")

    with pytest.raises(ValueError, match="out of pages"):
        graphs.run(B, fails)
    assert graphs.run(B, lambda: "b") == "b"
    assert B in graphs


def test_what_other_processes_take_meanwhile_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver says what is free on the whole GPU. A server whose neighbour started would capture no more."""
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
    monkeypatch.setattr("microscale.engine.graphs._capture_stream", lambda index: None)
    graphs = made()
    graphs._memory = "a pool"
    mib = 2**20
    cases = (
        (5 * mib, 0, 5 * mib),
        (45 * mib, 40 * mib, 45 * mib),
        (9000 * mib, 40 * mib, 40 * mib + GRAPH_ITSELF),
        (9000 * mib, -500 * mib, GRAPH_ITSELF),
        (-9000 * mib, 40 * mib, 0),
    )
    for rows, (taken, of_torch, counted) in enumerate(cases, start=1):  # noqa: B007
        before = graphs._bytes
        assert graphs.capture(decode_key(rows, 4), lambda: None)
        assert graphs._bytes - before == counted
    assert not graphs._failed


# ---- stand-ins -------------------------------------------------------------------------------------------------------


def test_the_cheapest_captured_size_that_holds_a_step_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its kind, and not much larger. A prompt alone keeps to those of prompts alone."""
    on_paper(monkeypatch)
    wide = SHORT_CONTEXT
    captured = [
        decode_key(4, 4), decode_key(16, 4), decode_key(8, wide), decode_key(512, 4),
        body(40, 2), body(100, 2), body(50, 17), body(400, 17), body(64, 21, wide),
        tail_key(4, 4), tail_key(8, 4),
        Step(16, 4, 4, 4, verify=True), Step(40, 16, 8, 4, verify=True),
    ]  # fmt: skip
    graphs = made()
    for key in reversed(captured):
        assert graphs.capture(key, lambda: None)
    graphs.stand_in = True
    cases = [
        (decode_key(4, 4), [1] * 4, captured[0]),
        (decode_key(3, 4), [1] * 3, captured[0]),
        (decode_key(5, 4), [1] * 5, captured[1]),
        (decode_key(3, wide), [1] * 3, captured[2]),
        (decode_key(100, 4), [1] * 100, None),  # 512 are more than four times as many
        (decode_key(9, wide), [1] * 9, None),
        (body(30, 2), [30], captured[4]),
        (body(41, 2), [41], captured[5]),
        (body(3, 2), [3], captured[4]),
        (body(24, 2, wide), [24], None),  # 64 tokens are with company
        (body(30, 17), [29, 1], captured[6]),
        (body(99, 17), [90, 9], None),
        (body(101, 17), [100, 1], captured[7]),
        (body(30, 17, wide), [29, 1], captured[8]),
        (tail_key(3, 4), [1] * 3, captured[9]),
        (tail_key(5, 4), [1] * 5, captured[10]),
        (verify_key([4, 4, 4, 4], 4), [4, 4, 4, 4], captured[11]),
        (verify_key([3, 4, 1], 4), [3, 4, 1], captured[12]),  # eight tokens of padding and one sequence left
        (verify_key([5, 4], 4), [5, 4], captured[12]),
        (verify_key([9, 4], 4), [9, 4], None),
    ]
    for wanted, counts, expected in cases:
        before = graphs.waited_for, graphs.stand_ins, graphs.missed[wanted]
        assert graphs.pick(wanted, counts) == (expected or wanted), (wanted, counts)
        after = graphs.waited_for, graphs.stand_ins, graphs.missed[wanted]
        own = wanted in captured
        assert [b - a for a, b in zip(before, after, strict=True)] == [
            expected is None, expected is not None and not own, not own
        ]  # fmt: skip
    # A benchmark runs each step in its own size.
    graphs.stand_in = False
    assert graphs.pick(decode_key(3, 4), [1] * 3) == decode_key(3, 4)


def test_a_step_without_a_graph_is_launched_and_never_waits_for_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    paper = on_paper(monkeypatch)
    graphs = made()
    graphs.stand_in = True
    assert [graphs.run(A, partial(paper.launch, "a")) for _ in range(3)] == ["a"] * 3
    assert (paper.ran, paper.captures) == (["a"] * 3, [])
    assert graphs.capture(A, partial(paper.launch, "a"))
    assert graphs.run(A, lambda: pytest.fail("launched")) == "a"
