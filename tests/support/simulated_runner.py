"""A mock model whose steps take simulated time, the first ones of each size longer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from microscale.engine.work import Work
from microscale.kernels.dense.spec import Logits
from support.mock_runner import MockRunner


@dataclass
class Clock:
    """In seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class FirstRunsRunner(MockRunner):
    """``first_runs`` counts steps that took ``first_ms`` more: two of each size, an eager one and one that captures."""

    first_runs = 0
    _clock: Clock
    _table: Mapping[int, Sequence[float]]
    _first_ms: float
    _ran: dict[tuple[int, int], int]

    @classmethod
    def around(
        cls, runner: MockRunner, clock: Clock, table: Mapping[int, Sequence[float]], first_ms: float
    ) -> FirstRunsRunner:
        """The same runner, with time. ``table``: of the most sequences, and fewer take as long."""
        runner.__class__ = cls
        assert isinstance(runner, cls)
        runner._clock, runner._table, runner._first_ms, runner._ran = clock, table, first_ms, {}
        return runner

    def forward(self, schedule: Sequence[Work], tokens: Tensor | None = None) -> Logits:
        lengths = [len(work.drafts) for work in schedule]
        size = (len(schedule), sum(lengths))
        self._ran[size] = self._ran.get(size, 0) + 1
        row = next(row for count, row in sorted(self._table.items()) if count >= len(schedule))
        ms = row[-(-sum(lengths) // len(schedule))]
        if self._ran[size] <= 2:
            self.first_runs += 1
            ms += self._first_ms
        self._clock.now += ms / 1e3
        return super().forward(schedule, tokens)
