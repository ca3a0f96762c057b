"""A draft head in simulated time: it costs time behind every step unless it rests, and requests whose steps it missed
are not drafted for. Requests end and others come, so that there are some which it has followed from the beginning."""

from __future__ import annotations

import random
from collections.abc import Sequence

from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.length import Length
from support.simulated_drafts import Table

LIFE = 400
"""Steps of a request."""


class HeadSimulation:
    """So many requests at a time, through a rule alone."""

    def __init__(self, rule: Length, table: Table, observed: dict[int, float], sequences: int) -> None:
        """``table``: a step's milliseconds by drafts, without the head where there are none; ``observed``: then with
        it."""
        self._rule, self._row, self._observed_ms = rule, table[sequences], observed[sequences]
        self._requests: list[Request] = []
        self._whole: set[str] = set()
        self._sequences = sequences
        self._began = 0
        self._chance = random.Random(3)
        self.steps = self.observed = 0

    def run(self, steps: int, acceptance: float) -> float:
        """Tokens a second."""
        tokens, ms = 0, 0.0
        for _ in range(steps):
            given, took = self._step(acceptance)
            tokens, ms = tokens + given, ms + took
        return 1e3 * tokens / ms

    def _come_and_go(self, rests: bool) -> None:
        """Requests end one after the other, and each makes room for a new one."""
        every = max(LIFE // self._sequences, 1)
        if len(self._requests) == self._sequences and self.steps % every == 0:
            gone = self._requests.pop(0)
            self._rule.forget(gone.request_id)
            self._whole.discard(gone.request_id)
        while len(self._requests) < self._sequences:
            self._began += 1
            request = Request(f"r{self._began}", [1], SamplingParams())
            self._requests.append(request)
            if not rests:
                self._whole.add(request.request_id)

    def _step(self, acceptance: float) -> tuple[int, float]:
        count = self._sequences
        self._come_and_go(self._rule.rests(count))
        able = [request for request in self._requests if request.request_id in self._whole]
        drafted: Sequence[int] = self._rule.choose(able, count) if able else []
        rests = self._rule.rests(count)
        self.steps += 1
        runs = not rests and bool(able)
        self.observed += runs
        if rests:
            self._whole.clear()
        accepted = 0
        for request, length in zip(able, drafted, strict=True):
            if length:
                hits = next((at for at in range(length) if self._chance.random() >= acceptance), length)
                self._rule.landed(request, length, hits)
                accepted += hits
        others = [request for request in self._requests if request.request_id not in {each.request_id for each in able}]
        lengths = [*drafted, *[0] * len(others)]
        ms = self._ms(sum(lengths), runs)
        self._rule.timed([*able, *others], lengths, ms * 1e3)
        return count + accepted, ms

    def _ms(self, drafts: int, runs: bool) -> float:
        if not drafts:
            return self._observed_ms if runs else self._row[0]
        low, part = divmod(drafts, self._sequences)
        first = self._observed_ms if low == 0 else self._row[low]
        last = self._row[min(low + 1, len(self._row) - 1)]
        return first + (last - first) * part / self._sequences
