"""The engine's own choice of drafts on machines as they are: hosts that are slow, late or wake up late, and contexts
that grow. Steps of gpt-oss-20b with an EAGLE3 head in MXFP8 on an H200, 2026-11-17, in simulated time.

By chance a run of one sequence is some percent off, so there are several, of which the mean is held against the best
fixed length on the same machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from statistics import mean

import pytest
import torch

from microscale.backends.ops import Sampled
from microscale.engine.limits import Limits
from microscale.engine.reading import Found, Reading
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.acceptance import Acceptance
from microscale.engine.speculation.costs import BASELINE_SEEN, StepCosts
from microscale.engine.speculation.length import PROBE_TOKENS, ByArithmetic, FixedLength, Length
from microscale.engine.speculation.speculation import SLOW_HOST, Speculation
from microscale.engine.work import Work
from support.drafters import KnowingDrafter
from support.mock_engine import VOCAB, System, alone
from support.simulated_ahead import AheadSimulation, Guesses, Head, Machine
from support.simulated_runner import Clock

LIMITS = Limits(page_size=4, window=6, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=2048)
MOST = 4
TABLE = {1: (1.34, 1.94, 2.31, 2.64, 2.95), 64: (4.97, 6.10, 7.24, 8.38, 9.40)}
"""Of 64 sequences none and three drafts were measured."""
PREDICTED = {1: (1.37, 1.87, 2.33, 2.63, 2.91), 64: (5.13, 6.20, 7.20, 8.26, 9.30)}
HEAD = Head(once={1: 0.05, 64: 0.10}, token={1: 0.11, 64: 0.15})
MACHINES = {
    "quick": Machine(0.15, 15.0, prepared=True),
    "slow host": Machine(0.5, 15.0, prepared=True),
    "late host": Machine(0.3, 15.0, prepared=True, late=0.5),
    "wakes late": Machine(0.15, 15.0, prepared=True, wakes=0.05),
    "long contexts": Machine(0.15, 15.0, prepared=True, growth=0.06),
}
SEEDS = {1: range(20), 64: range(2)}
on_machines = pytest.mark.parametrize("machine", MACHINES)


class Asleep(FixedLength):
    """No head at all."""

    def rests(self, sequences: int) -> bool:
        return True


WINDOWS = (100, 200, 200)


@dataclass(frozen=True)
class Run:
    """Tokens a second of each of ``WINDOWS``."""

    rates: tuple[float, ...]
    rested: bool = False

    @property
    def later(self) -> float:
        """After 100 steps."""
        return mean(self.rates[1:])

    @property
    def first_300(self) -> float:
        """Of tokens, which are steps where nothing is accepted."""
        return 300 / (100 / self.rates[0] + 200 / self.rates[1])


def run(rule: Length, machine: str, sequences: int, acceptance: float, seed: int = 0) -> Run:
    simulation = AheadSimulation(rule, TABLE, HEAD, sequences, turn_ms=0.1, seed=seed, machine=MACHINES[machine])
    rates = tuple(simulation.run(steps, acceptance) for steps in WINDOWS)
    return Run(rates, simulation.rested)


@cache
def fixed(machine: str, sequences: int, acceptance: float) -> list[Run]:
    """Of each length, from none on."""
    rules: list[Length] = [Asleep(0), *map(FixedLength, range(1, MOST + 1))]
    return [run(rule, machine, sequences, acceptance) for rule in rules]


@cache
def chosen(machine: str, sequences: int, acceptance: float) -> list[Run]:
    """By the engine, several times."""
    prior = HEAD.prior(PREDICTED)
    return [run(ByArithmetic(prior, MOST), machine, sequences, acceptance, seed) for seed in SEEDS[sequences]]


@on_machines
@pytest.mark.parametrize(("sequences", "acceptance"), [(1, 0.7), (1, 0.5), (1, 0.3), (64, 0.7), (64, 0.5), (64, 0.3)])
def test_after_100_steps_it_is_within_three_percent_of_the_best(
    machine: str, sequences: int, acceptance: float
) -> None:
    best = max(each.later for each in fixed(machine, sequences, acceptance))
    assert mean(each.later for each in chosen(machine, sequences, acceptance)) >= 0.97 * best


@on_machines
def test_bad_luck_does_not_end_drafts(machine: str) -> None:
    """On a slow host some runs in twenty were 15 to 23 % below the best for 200 steps and more, and a head rested."""
    best = max(each.later for each in fixed(machine, 1, 0.7))
    assert min(each.later for each in chosen(machine, 1, 0.7)) >= 0.95 * best
    assert not any(each.rested for each in chosen(machine, 1, 0.7))


@on_machines
@pytest.mark.parametrize(("sequences", "acceptance"), [(1, 0.0), (1, 0.3), (64, 0.0)])
def test_drafts_that_do_not_pay_cost_at_most_three_percent(machine: str, sequences: int, acceptance: float) -> None:
    none, runs = fixed(machine, sequences, acceptance)[0], chosen(machine, sequences, acceptance)
    assert mean(each.first_300 for each in runs) >= 0.97 * none.first_300
    assert mean(each.later for each in runs) >= 0.98 * none.later
    assert all(each.rested for each in runs)


# ---- the parts -------------------------------------------------------------------------------------------------------


class Times(FixedLength):
    """Remembers what it is told."""

    def __init__(self) -> None:
        super().__init__(3)
        self.us: list[int] = []

    def timed(self, requests: Sequence[Request], lengths: Sequence[int], us: float) -> None:
        self.us.append(round(us))


def test_a_step_that_the_host_was_late_for_is_not_timed_nor_is_the_next() -> None:
    clock, rule = Clock(), Times()
    speculation = Speculation(Guesses(), 3, rule, clock)
    schedule = [Work(Request("r", [1], SamplingParams()), 0, 1)]
    steps = [(1.0, True), (1.1, True), (1.2, True), (3.0, False), (0.2, True), (1.3, True)]
    # A host that never waits takes longer than the device: what it takes is the time.
    steps += [(1.4, False)] * (SLOW_HOST + 2)
    for ms, waited in steps:
        clock.now += ms / 1e3
        speculation.ended(schedule, waited=waited)
    assert rule.us == [1100, 1200, 1300, 1400, 1400]


class Event:
    """A device's, which has come or not."""

    def __init__(self, over: bool) -> None:
        self._over = over

    def query(self) -> bool:
        return self._over

    def synchronize(self) -> None:
        self._over = True


@pytest.mark.parametrize("over", [False, True])
def test_reading_tells_whether_the_host_waited(over: bool) -> None:
    sampled = Sampled(torch.tensor([3]), torch.tensor([-0.5]), torch.tensor([0]), None)
    reading = Reading(sampled, None)
    assert reading.found().tokens == [3]
    assert reading.waited  # on a CPU nobody is late
    vars(reading)["_copied"] = Event(over)
    assert reading.found().tokens == [3]
    assert reading.waited is not over


def test_an_engine_tells_whether_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps with drafts and without."""
    heard: list[tuple[bool, bool]] = []

    def ended(self: Speculation, schedule: Sequence[Work], *, waited: bool = True) -> None:
        heard.append((any(work.drafts for work in schedule), waited))

    monkeypatch.setattr(Speculation, "ended", ended)
    monkeypatch.setattr(Reading, "found", late(Reading.found))
    drafter = KnowingDrafter(lambda tokens, count: alone(tokens, count, LIMITS.window), VOCAB, 0.5)
    system = System(LIMITS, 200, 200, speculation=Speculation(drafter, 2, Now(2)))
    system.submit("r", [1, 5, 6], 40)
    system.run()
    assert set(heard) == {(True, False), (False, False)}


class Now(FixedLength):
    """Drafts in every other step."""

    _turn = 0

    def choose(self, requests: Sequence[Request], sequences: int) -> Sequence[int]:
        self._turn += 1
        return [self._tokens * (self._turn // 8 % 2)] * len(requests)


def late(found: Callable[[Reading], Found]) -> Callable[[Reading], Found]:
    def find(reading: Reading) -> Found:
        reading.waited = False
        return found(reading)

    return find


def test_what_drafts_have_shown_has_no_hope_in_it() -> None:
    known = Acceptance(3)
    assert known.shown("new", 3) == 0
    for _ in range(10):
        known.landed("bad", 3, 0)
    assert known.shown("bad", 3) == known.shown("new", 3) == 0
    for _ in range(200):
        known.landed("good", 2, 2)
    assert 1.8 < known.shown("good", 2) < 2
    assert known.shown("good", 3) == pytest.approx(known.shown("good", 2))  # nobody has seen a third token
    # What a request shows itself is soon more than what others have shown.
    for _ in range(10):
        known.landed("new", 2, 0)
    assert known.shown("new", 2) < 0.2


def test_a_first_draft_that_fails_does_not_end_drafts() -> None:
    rule, request = ByArithmetic(HEAD.prior(PREDICTED), MOST), Request("r", [1], SamplingParams())
    for _ in range(BASELINE_SEEN):
        rule.timed([request], [0], 1340.0)
    assert rule.choose([request], 1)[0] > 0
    rule.landed(request, 3, 0)
    assert rule.choose([request], 1) == [1]  # as long as pays, and no probe
    for _ in range(3):
        rule.landed(request, 3, 0)
    assert rule.choose([request], 1)[0] <= PROBE_TOKENS


def test_luck_is_not_on_the_account() -> None:
    """Ten drafts that fail in a row took more than an account can hold, after a hundred of which 70 % did not."""
    rule, request, chance = ByArithmetic(HEAD.prior(PREDICTED), MOST), Request("r", [1], SamplingParams()), Random(0)
    for _ in range(BASELINE_SEEN):
        rule.timed([request], [0], 1340.0)

    def draft(accepted: int) -> None:
        rule.timed([request], [3], 2640.0)
        rule.landed(request, 3, accepted)

    for _ in range(100):
        draft(next((place for place in range(3) if chance.random() >= 0.7), 3))
    for _ in range(10):
        draft(0)
        assert rule.choose([request], 1)[0] > 0


def test_one_short_time_does_not_make_drafts_dear() -> None:
    """A step without drafts that seems short, since the one before it was read late."""
    costs = StepCosts(HEAD.prior(PREDICTED), MOST)
    for us in (1390.0, 1000.0, 1390.0):
        costs.timed(1, 0, 0, us)
    assert costs.table(1).verify[0] == pytest.approx(1390)
