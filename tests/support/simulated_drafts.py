"""Drafts in simulated time: a batch that decodes for ever through a real ``Speculation``, with steps that take what a
table says. Nothing here looks at a clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.costs import Prior
from microscale.engine.speculation.drafter import Context, Launched
from microscale.engine.speculation.length import Length
from microscale.engine.speculation.speculation import Speculation
from microscale.engine.work import Work

Table = Mapping[int, Sequence[float]]
"""Sequences → milliseconds of a step with 0, 1, 2 … drafts each."""


def prior_of(table: Table) -> Prior:
    """A prediction that says what the table says, all of it verifying."""
    lengths = tuple(range(len(next(iter(table.values())))))
    step = tuple(tuple(ms * 1e3 for ms in row) for row in table.values())
    return Prior(tuple(table), lengths, step, tuple(tuple(0.0 for _ in row) for row in step))


def best_fixed(table: Table, sequences: int, acceptance: float) -> float:
    """Tokens a second of the best fixed length, on average."""
    given = [sum(acceptance**place for place in range(k + 1)) for k in range(len(table[sequences]))]
    return max(1e3 * sequences * tokens / ms for tokens, ms in zip(given, table[sequences], strict=True))


class SomeTokens:
    """A drafter whose drafts are as long as may be; what becomes of them is simulated."""

    def observe(self, step: Launched, most: int) -> None: ...

    def expects(self, context: Context) -> bool:
        return True

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        return [[7] * context.most for context in contexts]

    def forget(self, request_id: str) -> None: ...


class Simulation:
    """So many requests that decode for ever."""

    def __init__(
        self, rule: Length, most: int, table: Table, sequences: int, *, first_ms: float = 0.0, turn_ms: float = 0.0
    ) -> None:
        """``first_ms``: what the first two steps of each size take, the eager one and the one that captures.
        ``turn_ms``: what a step without drafts takes more right after one with drafts."""
        self._speculation = Speculation(SomeTokens(), most, rule, lambda: self.now)
        self._table, self._first_ms, self._turn_ms = table, first_ms, turn_ms
        self._last_drafts = 0
        params = SamplingParams(max_tokens=10**9)
        self._requests = [Request(f"r{at}", [1], params) for at in range(sequences)]
        self.first_runs: Callable[[], int] = lambda: self._first
        self.now = 0.0
        """In seconds."""
        self.tokens = 0
        self.steady = 0.0
        """Seconds less what first steps took."""
        self.drafted = 0
        self._first = 0
        self._ran: dict[tuple[int, ...], int] = {}
        self._chance = random.Random(0)

    def told(self) -> Simulation:
        """Of first steps the engine tells, as a runner with graphs does."""
        self._speculation._target_first_runs = self.first_runs
        return self

    def run(self, steps: int, acceptance: float) -> float:
        """Tokens a second, but for first steps."""
        tokens, steady = self.tokens, self.steady
        for _ in range(steps):
            self._step(acceptance)
        return (self.tokens - tokens) / (self.steady - steady)

    def _step(self, acceptance: float) -> None:
        drafts = self._speculation.propose(self._requests, lambda _, draft: draft)
        schedule = [self._work(request, tuple(drafts.get(request.request_id, ()))) for request in self._requests]
        total = sum(len(work.drafts) for work in schedule)
        ms = self._ms(total) + (self._turn_ms if self._last_drafts and not total else 0.0)
        self._last_drafts = total
        size = (total, max(len(work.drafts) for work in schedule))
        self._ran[size] = self._ran.get(size, 0) + 1
        first = self._first_ms if self._ran[size] <= 2 else 0.0
        self._first += first > 0
        self.steady += ms / 1e3
        self.now += (ms + first) / 1e3
        found = [self._accept(len(work.drafts), acceptance) for work in schedule]
        self._speculation.ended(schedule)
        for work, count in zip(schedule, found, strict=True):
            if work.drafts:
                self._speculation.landed(work, count)
        self.tokens += len(schedule) + sum(found)
        self.drafted += total

    def _work(self, request: Request, drafts: tuple[int, ...]) -> Work:
        return Work(request, 0, 1 + len(drafts), drafts=drafts)

    def _accept(self, drafted: int, acceptance: float) -> int:
        return next((at for at in range(drafted) if self._chance.random() >= acceptance), drafted)

    def _ms(self, drafts: int) -> float:
        """Along straight lines between the table's lengths."""
        row = self._table[len(self._requests)]
        low, part = divmod(drafts, len(self._requests))
        high = row[min(low + 1, len(row) - 1)]
        return row[low] + (high - row[low]) * part / len(self._requests)
