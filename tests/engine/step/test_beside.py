"""Captures while the device runs a step: they end when its tokens are there, and pause where that is too soon."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import pytest

from microscale.engine.loading.memory import Workload
from microscale.engine.loading.options import LoadOptions
from microscale.engine.step.capture_order import Key
from microscale.engine.step.decode import GraphKey
from microscale.engine.step.forward import TailKey
from microscale.engine.step.graphs import PART_LAYERS, Task
from microscale.engine.step.limits import Limits
from microscale.engine.step.pages import PagePool
from microscale.engine.step.runner import PAUSE, TOLERATED_S, ModelRunner
from microscale.models.config import LayerKind
from microscale.models.decoder import Parted
from support.loading import load_model
from support.paper_graphs import Paper, enable, on_paper

LAYER_S = 0.75e-3
LAYERS = 3 * PART_LAYERS


class Host:
    """A runner whose captures take a known time. ``step(s)``: one that the device needs so long for."""

    def __init__(self, runner: ModelRunner, paper: Paper) -> None:
        self.runner = runner
        self.now = 100.0
        self._paper = paper

    def layers(self, name: str, count: int) -> Parted[str]:
        for layer in range(count):
            self.now += LAYER_S
            self._paper.launch(f"{name}{layer}")
            if layer < count - 1:
                yield
        return name

    def task(self, key: Key) -> Task[str]:
        return 1, partial(
            self.layers, "t" if isinstance(key, TailKey) else "d", 1 if isinstance(key, TailKey) else LAYERS
        )

    def step(self, device_s: float) -> float:
        """How much longer it took for what was captured beside it."""
        done = self.now + device_s
        self.runner.beside(lambda: self.now >= done)
        late = max(0.0, self.now - done)
        self.now = max(self.now, done)
        return late


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    options = LoadOptions("gpt-oss-tiny", load_format="dummy", device="cpu", workload=Workload(page_size=4))
    model = load_model(options)
    limits = Limits(4, model.config.sliding_window, 5, 64, 256)
    runner = ModelRunner(model, {kind: PagePool(60) for kind in LayerKind}, limits, fill_up_prompts=True)
    paper = on_paper(monkeypatch)
    enable(runner._graphs)
    runner.prepare()
    paper.captures.clear()
    host = Host(runner, paper)
    monkeypatch.setattr(runner, "_task", host.task)
    monkeypatch.setattr("microscale.engine.step.runner.time.monotonic", lambda: host.now)
    runner._later = deque([GraphKey(50, 16), TailKey(50, 16), TailKey(51, 16), GraphKey(51, 16)])
    return host


def test_a_long_step_hides_captures(host: Host) -> None:
    """As much as goes into its time, of one graph after the other. It is late by a layer at most; nothing pauses."""
    waiting = len(host.runner._later)
    before = len(host.runner._graphs)
    for _ in range(3):
        assert host.step(20e-3) <= LAYER_S + 1e-9
    assert len(host.runner._later) == waiting - 4
    assert len(host.runner._graphs) == before + 4
    assert [len(capture) for capture in host._paper.captures] == [LAYERS, 1, 1, 1, LAYERS - 1]
    assert host.runner._graphs.waited_for == 0


def test_short_steps_lose_little(host: Host) -> None:
    """A step of 1.5 ms is late by some layers, then there is a pause: steps lose a fortieth."""
    began, late = host.now, []
    while host.runner._later:
        late.append(host.step(1.5e-3))
    delayed = [each for each in late if each]
    assert max(late) <= PART_LAYERS * LAYER_S
    assert len(delayed) == 2 * LAYERS // PART_LAYERS
    assert sum(delayed) < (host.now - began) / PAUSE + len(delayed) * (TOLERATED_S + LAYER_S) + max(late)
    assert len(late) > 80 * (len(delayed) - 1)


def test_a_pause_ends(host: Host) -> None:
    late = host.step(1.5e-3)
    pause = PAUSE * (late - TOLERATED_S)
    assert pause > 0.1
    ended = host.now + pause
    captured = len(host._paper.captures)
    while host.now < ended - 3e-3:
        assert not host.step(1.5e-3)
    assert len(host._paper.captures) == captured
    host.now = ended + LAYER_S
    assert host.step(1.5e-3)
    assert len(host._paper.captures) == captured + 1


@pytest.mark.parametrize("why", ["nothing left", "off", "a kind that never ran", "waits"])
def test_nothing_is_captured(host: Host, why: str) -> None:
    graphs = host.runner._graphs
    changes: dict[str, Callable[[], object]] = {
        "nothing left": host.runner._later.clear,
        "off": lambda: setattr(graphs, "_memory", None),
        "a kind that never ran": graphs._ran.clear,
        "waits": lambda: setattr(graphs, "_waits", True),
    }
    changes[why]()
    assert not host.step(1.5e-3)
    assert not host._paper.captures
