"""Graphs are captured while the device is busy with those before, and give what the work gives."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from microscale.engine.step.graphs import PART_LAYERS, Graphs, after_layers, whole
from microscale.models.decoder import Parted

DEVICE = torch.device("cuda")
KEYS = 12
CYCLES = 4_000_000_000
"""Of a kernel that only waits: two seconds, a hundred captures."""


class Stopped(Exception):
    """The work is given up."""


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_captured_beside_running_work_is_right(waits: bool) -> None:
    graphs = Graphs(DEVICE, lambda tokens: None, enabled=True, waits=waits)
    x = torch.arange(1 << 16, dtype=torch.float32, device=DEVICE)
    weight = torch.eye(256, device=DEVICE) * 2

    def work(key: int) -> Tensor:
        return (x.view(-1, 256) @ weight + key).flatten().contiguous()

    def stopped() -> Tensor:
        work(0)
        raise Stopped

    found = [graphs.run(-1, 1, whole(partial(work, -1))).clone()]
    busy = torch.randn(4096, 4096, device=DEVICE)
    for key in range(KEYS):
        busy = (busy @ busy).clamp_(-1, 1)
        found.append(graphs.run(key, 1, whole(partial(work, key))).clone())
        if key % 4 == 1:
            with pytest.raises(Stopped):
                graphs.run(1000 + key, 1, whole(stopped))
    for key in (3, 0, KEYS - 1):
        found.append(graphs.run(key, 1, lambda: pytest.fail("captured again")).clone())
    expected = [-1, *range(KEYS), 3, 0, KEYS - 1]
    for key, each in zip(expected, found, strict=True):
        assert torch.equal(each, 2 * x + key), key


def test_a_capture_does_not_wait_for_the_device() -> None:
    graphs = Graphs(DEVICE, lambda tokens: None, enabled=True, waits=False)
    x = torch.zeros(1024, device=DEVICE)
    for key in (0, 1):  # the first runs as it is, and the first capture waits
        graphs.run(key, 1, whole(lambda: x + 1))
    torch.cuda._sleep(CYCLES)
    behind = torch.cuda.Event()
    behind.record()
    graphs.run(2, 1, whole(lambda: x + 1))
    assert not behind.query()
    torch.cuda.synchronize()
    assert behind.query()


def layers(x: Tensor, weight: Tensor, key: int, count: int) -> Parted[Tensor]:
    """Each layer hands on two tensors, one of which is read only layers later."""
    kept = [x]
    for layer in range(count):
        x = (x.view(-1, 256) @ weight).flatten() + key
        kept.append(x * 0.5)
        x = x + kept[max(0, layer - 3)]
        if layer < count - 1:
            yield
    return x.contiguous()


def test_graphs_in_parts_give_what_the_work_gives() -> None:
    """Captured while the device is busy, a few layers at a time, with captures and replays of others in between; and
    at once when they are wanted half captured, or not at all. The bits are those of a run without a graph."""
    graphs = Graphs(DEVICE, lambda tokens: None, enabled=True, waits=False)
    x = torch.randn(1 << 16, device=DEVICE)
    weight = torch.randn(256, 256, device=DEVICE) / 16
    count = 2 * PART_LAYERS + 3
    tasks = {key: partial(layers, x, weight, key, count) for key in range(KEYS)}

    def wanted(key: int) -> Tensor:
        work = tasks[key]()
        while True:
            try:
                next(work)
            except StopIteration as end:
                found: Tensor = end.value
                return found

    expected = {key: wanted(key).clone() for key in tasks}
    for key in (0, 0):  # the first runs as it is, and the first capture waits
        assert torch.equal(graphs.run(key, 1, tasks[key]), expected[key])
    busy = torch.randn(4096, 4096, device=DEVICE)
    done = dict.fromkeys(range(1, 8), False)
    while not all(done.values()):
        busy = (busy @ busy).clamp_(-1, 1)
        for key in done:
            done[key] = done[key] or graphs.capture(key, 1, tasks[key], after_layers(2 + key))
        assert torch.equal(graphs.run(0, 1, tasks[0]), expected[0])
    graphs.capture(8, 1, tasks[8], after_layers(5))
    for key in (8, 9):
        assert torch.equal(graphs.run(key, 1, tasks[key]), expected[key]), key
    x.mul_(-1)
    expected = {key: wanted(key).clone() for key in tasks}
    for key in (*range(9, -1, -1), *range(10)):
        assert torch.equal(graphs.run(key, 1, lambda: pytest.fail("captured again")), expected[key]), key
    assert graphs.waited_for == 3


def test_a_capture_beside_a_step_does_not_wait_for_it() -> None:
    """A few layers at a time, while the device is busy."""
    graphs = Graphs(DEVICE, lambda tokens: None, enabled=True, waits=False)
    x, weight = torch.zeros(1 << 16, device=DEVICE), torch.eye(256, device=DEVICE)
    for key in (0, 1):
        graphs.run(key, 1, partial(layers, x, weight, key, 8))
    torch.cuda._sleep(CYCLES)
    behind = torch.cuda.Event()
    behind.record()
    while not graphs.capture(2, 1, partial(layers, x, weight, 2, 8), after_layers(3)):
        pass
    assert not behind.query()
    torch.cuda.synchronize()
    assert len(graphs) == 2


@pytest.mark.parametrize("plenty", [0, 1 << 60])
def test_torchs_cache_is_emptied_only_where_memory_is_short(plenty: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To free memory waits for the device."""
    graphs = Graphs(DEVICE, lambda tokens: None, enabled=True, waits=False)
    x = torch.zeros(1024, device=DEVICE)
    for key in (0, 1):
        graphs.run(key, 1, whole(lambda: x + 1))
    emptied: list[int] = []
    monkeypatch.setattr("microscale.engine.step.graphs.PLENTY", plenty)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    graphs.run(2, 1, whole(lambda: x + 2))
    assert len(emptied) == (plenty > 0)
