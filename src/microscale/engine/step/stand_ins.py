"""Stand-ins: a step whose graph is not captured yet runs in a larger one that is, filled up with nobody's tokens.

A stand-in costs some ms at most; to capture the graph first would cost 25 to 50, while everybody waits. A large step
that has none is launched kernel by kernel, which the GPU's own time hides. What was wanted is remembered: it is
captured first when there is nothing else to do, or, where that never happens, a few layers behind every 64th step that
wants it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from microscale.engine.step.decode import GraphKey
from microscale.engine.step.graphs import Graphs
from microscale.engine.step.prompt import PromptKey, TailKey
from microscale.engine.step.verify import VerifyKey

Key: TypeAlias = GraphKey | VerifyKey | PromptKey | TailKey
AnyKey = TypeVar("AnyKey", GraphKey, VerifyKey, PromptKey, TailKey)

OFTEN = 64
"""Steps in a stand-in after which some layers of the wanted graph are captured, though others wait for it: 5 to 8 ms of
64 steps of 1.5 ms and more, until it is complete. A fifth of padding pays for it within as many steps again."""

LARGE = 1024
"""Tokens from which on the GPU takes about as long as the host to launch a step's kernels: 15 to 26 ms of an H200 up to
2048 of gpt-oss-20b, 20 to 31 of its host. To capture the step and then replay it would take both, one after the
other."""


class StandIns:
    """Which captured graph a step runs in, and which one it should have had."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self.enabled = False
        """Where not, every step runs in a graph of its own size, which is captured when it comes up: in benchmarks of
        steps, and wherever graphs must give the bits of single launches."""
        self.steps = 0
        """That ran in one so far, bodies and tails for themselves."""
        self._wanted: Counter[Key] = Counter()
        self._due: list[Key] = []

    def of(self, key: AnyKey, fits: Callable[[AnyKey], bool]) -> AnyKey:
        """The graph to run: that of ``key`` if it is captured, else the cheapest one that the step ``fits`` into. If
        there is none, that of ``key`` all the same."""
        if not self.enabled or key in self._graphs:
            return key
        found = [each for each in self._graphs.sizes(type(key)) if fits(each)]
        if not found:
            return key
        self.steps += 1
        self._want(key)
        return min(found, key=lambda each: each.cost)

    def launches(self, key: PromptKey) -> bool:
        """Whether a step that has no graph is launched and not captured: it is so large that this takes no longer."""
        if not self.enabled or not self._graphs.enabled or key.tokens <= LARGE or key in self._graphs:
            return False
        self._want(key)
        return True

    def _want(self, key: Key) -> None:
        self._graphs.first_runs += 1  # what it takes says nothing of the next
        self._wanted[key] += 1
        if not self._wanted[key] % OFTEN:
            self._due.append(key)

    def most_wanted(self) -> Key | None:
        """What most steps wanted that ran without it."""
        return max(self._wanted, key=lambda key: self._wanted[key], default=None)

    def due(self) -> list[Key]:
        """Those that were wanted so often that some layers of each are to be captured now."""
        due, self._due = self._due, []
        return due

    def done(self, key: Key) -> None:
        """There is nothing left to capture of it."""
        del self._wanted[key]
