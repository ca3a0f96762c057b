"""A draft head whose steps run ahead, in simulated time: a host that launches and reads, and a GPU that runs in order.

    step()   launch the next step, and the head behind it; then read the last one
             a step without drafts after one with drafts: read first, then launch, and the GPU waits for the host

So what the head guesses is decided before the last step is read, a new size is captured while the GPU runs what was
launched before, and who ran while the head rested is not drafted for any more. One batch that decodes for ever, as in
``bench``."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from microscale.engine.prediction.drafts import tokens_of
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.costs import Prior
from microscale.engine.speculation.drafter import Context, Launched
from microscale.engine.speculation.length import Length
from microscale.engine.speculation.speculation import Speculation
from microscale.engine.work import Work
from support.simulated_drafts import Table


@dataclass(frozen=True)
class Machine:
    """What a host does, in milliseconds, and what tables of steps do not say."""

    launch: float = 0.1
    """To launch a step, or the head behind it."""
    capture: float = 40.0
    """To capture a graph, of a step or of the head."""
    prepared: bool = False
    """All graphs of steps were captured before the first one, and the head has one for each power of two of rows."""
    late: float = 0.0
    """What one launch in ten takes longer, on average."""
    wakes: float = 0.0
    """From the end of a step until the host has read it, on average."""
    growth: float = 0.0
    """What a step takes longer for every 1,000 tokens that were generated."""


QUIET = Machine()


@dataclass(frozen=True)
class Head:
    """Milliseconds that it takes behind a step, by the number of sequences."""

    once: Mapping[int, float]
    """Whatever it guesses."""
    token: Mapping[int, float]
    """For each token that it guesses."""

    def ms(self, sequences: int, guessed: int) -> float:
        return self.once[sequences] + guessed * self.token[sequences]

    def prior(self, table: Table) -> Prior:
        """A prediction that says what a table says, of which the head has its part."""
        lengths = range(len(next(iter(table.values()))))
        draft = {count: [self.ms(count, k) if k else 0.0 for k in lengths] for count in table}
        step = tuple(tuple(1e3 * (ms - draft[count][k]) for k, ms in enumerate(row)) for count, row in table.items())
        return Prior(tuple(table), tuple(lengths), step, tuple(tuple(1e3 * ms for ms in row) for row in draft.values()))


class Guesses:
    """As many as were guessed behind the last step."""

    count = 0

    def observe(self, step: Launched, most: int) -> None: ...

    def expects(self, context: Context) -> bool:
        return self.count > 0

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        return [[7] * min(context.most, self.count) for context in contexts]

    def drafts_ahead(self, requests: Sequence[Request], most: int) -> Tensor | None:
        return None

    def forget(self, request_id: str) -> None: ...


@dataclass(frozen=True)
class _Flight:
    schedule: list[Work]
    end_ms: float
    """When the GPU has drawn its tokens."""

    @property
    def drafts(self) -> int:
        return sum(len(work.drafts) for work in self.schedule)


class AheadSimulation:
    """So many requests through a real ``Speculation``."""

    def __init__(
        self, rule: Length, table: Table, head: Head, sequences: int, *, turn_ms: float, seed: int,
        machine: Machine = QUIET,
    ) -> None:  # fmt: skip
        """``table``: a step's milliseconds by drafts, with the head's work for them; without drafts without it.
        ``turn_ms``: from reading a step to launching the next."""
        self._rule, self._head, self._row, self._count = rule, head, table[sequences], sequences
        self._turn_ms = turn_ms
        self._guesses = Guesses()
        self._speculation = Speculation(self._guesses, len(self._row) - 1, rule, lambda: self._host / 1e3)
        self._speculation._target_first_runs = lambda: len(self._captured)
        params = SamplingParams(max_tokens=10**9)
        self._requests = [Request(f"r{at}", [1], params) for at in range(sequences)]
        self._machine = machine
        self._chance = random.Random(seed)
        self._delays = random.Random(seed)
        self._generated = 0.0
        self._captured: set[tuple[str, int, int]] = set()
        self._host = self._gpu = 0.0
        self.rested = False
        self._flight = self._launch()

    def run(self, steps: int, acceptance: float) -> float:
        """Tokens a second, but for steps with a capture, as ``bench`` counts. Of each length as many tokens as it gives
        on average: what chance made of 300 steps of one sequence is 3 % off."""
        tokens, ms = 0.0, 0.0
        for _ in range(steps):
            began, captured = self._host, len(self._captured)
            given = sum(tokens_of(acceptance, len(work.drafts)) for work in self._flight.schedule)
            self._step(acceptance)
            self._generated += given / self._count
            if len(self._captured) == captured:
                tokens, ms = tokens + given, ms + self._host - began
        return 1e3 * tokens / ms

    def _step(self, acceptance: float) -> None:
        flight, ahead = self._flight, self._drafts()
        if ahead or not flight.drafts:
            self._flight = self._launch(ahead)
            self._land(flight, acceptance)
        else:
            self._land(flight, acceptance)
            self._host += self._turn_ms
            self._flight = self._launch(self._drafts())

    def _drafts(self) -> Mapping[str, Sequence[int]]:
        return {} if self.rested else self._speculation.propose(self._requests, lambda _, draft: draft)

    def _launch(self, drafts: Mapping[str, Sequence[int]] | None = None) -> _Flight:
        found = [tuple((drafts or {}).get(request.request_id, ())) for request in self._requests]
        schedule = [Work(each, 0, 1 + len(own), drafts=own) for each, own in zip(self._requests, found, strict=True)]
        total = sum(map(len, found))
        end = self._run("step", total, 0, self._verify_ms(total))
        self.rested = self.rested or self._rule.rests(self._count)
        self._guesses.count = 0
        if not self.rested:
            self._guesses.count = max(self._rule.choose(self._requests, self._count), default=0)
            self._run("head", total, self._guesses.count, self._head.ms(self._count, self._guesses.count))
        return _Flight(schedule, end)

    def _run(self, what: str, rows: int, guessed: int, ms: float) -> float:
        """Launch a graph behind what the GPU has to do: when it will have done it."""
        machine, size = self._machine, (what, rows, guessed)
        if machine.prepared and what == "head":
            size = (what, (rows + self._count - 1).bit_length(), guessed)
        known = size in self._captured or (machine.prepared and what == "step")
        self._host += machine.launch if known else machine.capture
        if machine.late and self._delays.random() < 0.1:
            self._host += self._delays.expovariate(1 / machine.late)
        if not known:
            self._captured.add(size)
        if what == "step":
            ms += machine.growth * self._generated / 1e3
        self._gpu = max(self._gpu, self._host) + ms
        return self._gpu

    def _verify_ms(self, drafts: int) -> float:
        """Along straight lines between the table's lengths."""
        verify = [self._row[0], *(ms - self._head.ms(self._count, k) for k, ms in enumerate(self._row) if k)]
        low, part = divmod(drafts, self._count)
        high = verify[min(low + 1, len(verify) - 1)]
        return verify[low] + (high - verify[low]) * part / self._count

    def _land(self, flight: _Flight, acceptance: float) -> None:
        waited = flight.end_ms > self._host
        self._host = max(self._host, flight.end_ms)
        if self._machine.wakes:
            self._host += self._delays.expovariate(1 / self._machine.wakes)
        found = [self._accept(len(work.drafts), acceptance) for work in flight.schedule]
        self._speculation.ended(flight.schedule, waited=waited)
        for work, count in zip(flight.schedule, found, strict=True):
            if work.drafts:
                self._speculation.landed(work, count)

    def _accept(self, drafted: int, acceptance: float) -> int:
        return next((at for at in range(drafted) if self._chance.random() >= acceptance), drafted)
