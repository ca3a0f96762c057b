"""When graphs are captured: at start, between steps and when idle, within a delay and a budget. The clock is made up."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microscale.engine.step.graph_queue import GraphQueue

MB = 1_000_000


@dataclass
class Bench:
    """A capturer whose parts take as long as it is told, and the clock that they take it from."""

    part_s: float = 0.006
    num_parts: int = 3
    graph_bytes: int = 2 * MB
    broken: set[Hashable] = field(default_factory=set)
    now: float = 0.0
    used: int = 0
    captured: list[Hashable] = field(default_factory=list)
    begun: list[Hashable] = field(default_factory=list)

    def parts(self, key: Hashable) -> Iterator[None]:
        self.begun.append(key)
        for part in range(self.num_parts):
            self.now += self.part_s
            self.used += self.graph_bytes // self.num_parts
            if key in self.broken:
                raise RuntimeError("operation not permitted when stream is capturing")
            if part + 1 < self.num_parts:
                yield
        self.captured.append(key)

    def used_bytes(self) -> int:
        return self.used

    def queue(self, budget_bytes: int = 1000 * MB) -> GraphQueue:
        return GraphQueue(self, budget_bytes, clock=lambda: self.now)


def test_at_start_the_common_ones_in_order_as_long_as_it_may_last() -> None:
    bench = Bench()
    queue = bench.queue()
    queue.add([1, 2, 4, 8, 16, 32, 64])
    assert queue.at_start(within_s=0.100) == 5
    assert bench.captured == [1, 2, 4, 8, 16]
    assert bench.now <= 0.100
    assert queue.has_work
    queue.add([1, 2])  # what is there is not captured twice
    assert queue.at_start(within_s=10.0) == 2
    assert not queue.has_work
    assert queue.at_start(within_s=10.0) == 0


def test_a_capture_goes_on_between_steps_and_delays_none_for_long() -> None:
    bench = Bench(part_s=0.009, num_parts=5)
    queue = bench.queue()
    queue.ran_without("seven rows")
    delays = []
    while queue.has_work:
        began = bench.now
        queue.between_steps()
        delays.append(bench.now - began)
    assert bench.captured == ["seven rows"]
    assert delays == pytest.approx([0.018, 0.018, 0.009])


def test_parts_that_take_too_long_wait_until_nobody_does() -> None:
    bench = Bench(part_s=0.050)
    queue = bench.queue()
    queue.ran_without("a")
    queue.between_steps()  # the first teaches how long they take
    assert bench.now == pytest.approx(0.050)
    for _ in range(10):
        queue.between_steps()
    assert bench.now == pytest.approx(0.050)
    asked = iter([False, True])
    queue.when_idle(lambda: next(asked))
    assert bench.now == pytest.approx(0.100)
    assert bench.captured == []
    queue.when_idle(lambda: False)
    assert bench.captured == ["a"]


def test_what_is_wanted_comes_before_what_is_common() -> None:
    bench = Bench()
    queue = bench.queue()
    queue.add(["common"])
    for key in ("rare", "often", "often"):
        queue.ran_without(key)
    queue.when_idle(lambda: False)
    assert bench.captured == ["often", "rare", "common"]
    queue.ran_without("often")  # it has one: nothing to do
    assert not queue.has_work


def test_a_capture_that_has_begun_is_ended_first() -> None:
    bench = Bench(part_s=0.015)
    queue = bench.queue()
    queue.ran_without("first")
    queue.between_steps()
    for _ in range(5):
        queue.ran_without("second")
    queue.when_idle(lambda: False)
    assert bench.captured == ["first", "second"]


def test_graphs_stay_within_their_budget(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    bench = Bench(graph_bytes=3 * MB)
    queue = bench.queue(budget_bytes=10 * MB)
    queue.add(range(100))
    queue.when_idle(lambda: False)
    assert bench.captured == [0, 1, 2]
    assert bench.used == 9 * MB
    assert not queue.has_work
    queue.ran_without("more")
    queue.between_steps()
    assert bench.begun == [0, 1, 2]
    assert caplog.text.count("no more are captured") == 1
    assert "Graphs take 9 of 10 MB" in caplog.text


def test_a_key_that_cannot_be_captured_costs_itself_alone(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(broken={"b"})
    queue = bench.queue()
    queue.add(["a", "b", "c"])
    queue.when_idle(lambda: False)
    queue.ran_without("b")
    assert not queue.has_work
    assert bench.captured == ["a", "c"]
    assert bench.begun == ["a", "b", "c"]
    assert "The graph of b cannot be captured" in caplog.text


@given(
    parts=st.lists(st.floats(0.0001, 0.019), min_size=1, max_size=40),
    wanted=st.lists(st.integers(0, 5), max_size=30),
)
def test_no_step_waits_longer_than_a_part_may_vary(parts: list[float], wanted: list[int]) -> None:
    """Whatever parts take, a delay is at most the bound and by how much the last part was slower than those before."""
    bench = Bench(num_parts=4)
    queue = bench.queue()
    slowest = 0.0
    for number in range(200):
        if number < len(wanted):
            queue.ran_without(wanted[number])
        bench.part_s = parts[number % len(parts)]
        began = bench.now
        queue.between_steps()
        slowest = max(slowest, bench.part_s)
        assert bench.now - began <= 0.020 + slowest
    assert set(bench.captured) == set(wanted)
