"""Lengths of drafts in simulated time: what drafts cost and how likely they are accepted is set, and the rule must find
it out. Nothing here looks at a clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from torch import Tensor

from microscale.engine.limits import Limits
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation import costs as costs_module
from microscale.engine.speculation.acceptance import AT_FIRST, Acceptance
from microscale.engine.speculation.costs import Prior, StepCosts
from microscale.engine.speculation.length import ByArithmetic, FixedLength, Length
from microscale.engine.speculation.speculation import Speculation
from microscale.engine.work import Work
from microscale.kernels.dense.spec import Logits
from support.drafters import KnowingDrafter
from support.mock_engine import VOCAB, System, alone
from support.mock_runner import MockRunner

MOST = 5
Time = Callable[[int, int, int], float]
"""Of a step: sequences, drafts in all, the longest draft; in microseconds."""


def experts_like(sequences: int, drafts: int, longest: int) -> float:
    """About gpt-oss-120b on an H200: 128 experts of which each token uses 4, and 200 us of the host with drafts."""
    used = 128 * (1 - (1 - 4 / 128) ** (sequences + drafts))
    return 1300 + 110 * used + 8 * (sequences + drafts) + (200 if drafts else 0)


def with_head(sequences: int, drafts: int, longest: int) -> float:
    return experts_like(sequences, drafts, longest) + 250 * longest


def linear(sequences: int, drafts: int, longest: int) -> float:
    return 1000.0 * (sequences + drafts) + 200 * bool(drafts)


def prior_of(time: Time) -> Prior:
    sizes, lengths = (1, 4, 16, 64), (0, 1, 3, MOST)
    step = tuple(tuple(time(size, size * count, 0) for count in lengths) for size in sizes)
    whole = tuple(tuple(time(size, size * count, count) for count in lengths) for size in sizes)
    draft = tuple(tuple(a - b for a, b in zip(one, other, strict=True)) for one, other in zip(whole, step, strict=True))
    return Prior(sizes, lengths, step, draft)


def free(sequences: int, drafts: int, longest: int) -> float:
    """What a prior may say that is far too hopeful: drafts cost nothing."""
    return 2000.0


class Simulation:
    """A batch that decodes for ever."""

    def __init__(self, rule: Length, time: Time, sequences: int) -> None:
        self.rule = rule
        self.time = time
        self.requests = [Request(f"r{at}", [1], SamplingParams()) for at in range(sequences)]
        self.tokens, self.us = 0, 0.0
        self.lengths: list[list[int]] = []
        self._chance = random.Random(0)

    def run(self, steps: int, acceptance: Sequence[float]) -> float:
        """Tokens a microsecond; ``acceptance`` of each request's tokens."""
        tokens, us = self.tokens, self.us
        for _ in range(steps):
            self._step(acceptance)
        return (self.tokens - tokens) / (self.us - us)

    def _step(self, acceptance: Sequence[float]) -> None:
        lengths = list(self.rule.choose(self.requests, len(self.requests)))
        assert lengths == list(self.rule.choose(self.requests, len(self.requests)))
        accepted = 0
        for request, length, luck in zip(self.requests, lengths, acceptance, strict=True):
            count = next((at for at in range(length) if self._chance.random() >= luck), length)
            if length:
                self.rule.landed(request, length, count)
            accepted += count
        us = self.time(len(lengths), sum(lengths), max(lengths))
        self.rule.timed(self.requests, lengths, us)
        self.tokens += len(lengths) + accepted
        self.us += us
        self.lengths.append(lengths)


def undrafted(time: Time, sequences: int) -> float:
    return sequences / time(sequences, 0, 0)


def best_fixed(time: Time, sequences: int, acceptance: float) -> float:
    """The best that one length for all steps does, on average."""
    return max(
        sequences * sum(acceptance**place for place in range(k + 1)) / time(sequences, sequences * k, k)
        for k in range(MOST + 1)
    )


@pytest.mark.parametrize("sequences", [1, 4, 16, 64])
@pytest.mark.parametrize("time", [experts_like, with_head, linear], ids=lambda time: time.__name__)
@pytest.mark.parametrize("hopeful", [False, True], ids=["predicted well", "predicted as free"])
def test_a_drafter_without_any_luck_costs_at_most_three_percent(sequences: int, time: Time, hopeful: bool) -> None:
    simulation = Simulation(ByArithmetic(prior_of(free if hopeful else time), MOST), time, sequences)
    rate = simulation.run(1200, [0.0] * sequences)
    assert rate >= undrafted(time, sequences) / 1.03
    if time is not linear:
        assert any(any(lengths) for lengths in simulation.lengths[500:])  # it still looks now and then


def test_probes_are_held_against_steps_without_of_the_same_time() -> None:
    """64 sequences of gpt-oss-20b on an H200: for a while after prompts all steps are slower, and those with any drafts
    take 0.26 ms more than those without. Held against the first steps, a probe in every step seemed to cost nothing."""
    ran = [0]

    def after_prompts(sequences: int, drafts: int, longest: int) -> float:
        ran[0] += 1
        return (4893.0 + 262.0 * bool(drafts) + 14.0 * drafts) * (1.06 if ran[0] <= 8 else 1.0)

    def predicted(sequences: int, drafts: int, longest: int) -> float:
        return 5120.0 + 15.0 * drafts

    simulation = Simulation(ByArithmetic(prior_of(predicted), MOST), after_prompts, 64)
    assert simulation.run(448, [0.0] * 64) >= 64 / 4893.0 / 1.03
    assert simulation.run(448, [0.0] * 64) >= 64 / 4893.0 / 1.025
    assert sum(map(any, simulation.lengths[-448:])) < 448 / 2


@pytest.mark.parametrize("sequences", [1, 4, 24])
@pytest.mark.parametrize("time", [experts_like, with_head], ids=lambda time: time.__name__)
@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("hopeful", [False, True], ids=["predicted well", "predicted as free"])
def test_it_is_about_as_good_as_the_best_fixed_length(
    sequences: int, time: Time, acceptance: float, hopeful: bool
) -> None:
    """Which nobody knew before."""
    simulation = Simulation(ByArithmetic(prior_of(free if hopeful else time), MOST), time, sequences)
    simulation.run(400, [acceptance] * sequences)
    rate = simulation.run(1000, [acceptance] * sequences)
    assert rate >= 0.95 * best_fixed(time, sequences, acceptance)
    assert rate >= undrafted(time, sequences) / 1.03


def test_steps_that_cost_by_the_token_have_no_drafts() -> None:
    """However good the drafter is: and where that is known nobody looks either."""
    simulation = Simulation(ByArithmetic(prior_of(linear), MOST), linear, 64)
    simulation.run(200, [1.0] * 64)
    assert not any(map(any, simulation.lengths))


def test_a_capture_is_not_put_down_to_drafts() -> None:
    """The first steps of each number of drafts take twenty times as long, and drafts go on."""
    seen: dict[int, int] = {}

    def capturing(sequences: int, drafts: int, longest: int) -> float:
        seen[drafts] = seen.get(drafts, 0) + 1
        return experts_like(sequences, drafts, longest) * (20 if seen[drafts] == 1 else 1)

    simulation = Simulation(ByArithmetic(prior_of(experts_like), MOST), capturing, 1)
    simulation.run(300, [0.9])
    assert sum(map(any, simulation.lengths)) > 200


def test_acceptance_is_learned_anew() -> None:
    """A text that nobody could draft turns into one that anybody can, and back."""
    simulation = Simulation(ByArithmetic(prior_of(experts_like), MOST), experts_like, 1)
    simulation.run(1000, [0.0])
    assert sum(map(sum, simulation.lengths[-200:])) < 40
    simulation.run(400, [0.95])
    rate = simulation.run(400, [0.95])
    assert rate >= 0.95 * best_fixed(experts_like, 1, 0.95)
    simulation.run(100, [0.0])
    assert simulation.run(1000, [0.0]) >= undrafted(experts_like, 1) / 1.03


def test_each_request_has_its_own_length() -> None:
    simulation = Simulation(ByArithmetic(prior_of(experts_like), MOST), experts_like, 4)
    simulation.run(400, [0.95, 0.95, 0.05, 0.05])
    lengths = simulation.lengths[-100:]
    means = [sum(each[at] for each in lengths) / len(lengths) for at in range(4)]
    assert min(means[:2]) > 2
    assert max(means[2:]) < 0.5


def test_requests_that_may_have_none_are_counted_in_the_step() -> None:
    """Two of 64 sequences may be drafted: the step costs what 64 cost."""
    rule = ByArithmetic(prior_of(linear), MOST)
    requests, others = [[Request(f"r{at}", [1], SamplingParams()) for at in each] for each in (range(2), range(2, 64))]
    for _ in range(3):
        rule.timed([*requests, *others], [0] * 64, linear(64, 0, 0))
    assert list(rule.choose(requests, 64)) == [0, 0]
    assert list(rule.choose([], 64)) == []


# ---- acceptance ------------------------------------------------------------------------------------------------------


def test_acceptance_by_place() -> None:
    known = Acceptance(4)
    assert known.by_place("new") == [AT_FIRST] * 4
    for _ in range(500):
        known.landed("a", 3, 1)  # the first is right, the second wrong, nobody knows of the third
    first, second, third, fourth = known.by_place("a")
    assert first > 0.95
    assert second < 0.1
    assert third < 0.2 > fourth  # as the place before it, until somebody saw it
    assert known.chances("a") == pytest.approx([first, first * second, first * second * third, known.chances("a")[3]])
    # A new request is taken to be like those before it, and then by what it shows.
    assert known.by_place("b")[0] > 0.9
    for _ in range(30):
        known.landed("b", 1, 0)
    assert known.by_place("b")[0] < 0.3
    assert known.by_place("a")[0] > 0.9
    known.forget("b")
    assert known.tries("b") == 0


def test_what_was_known_of_others_is_news_to_all() -> None:
    known = Acceptance(2)
    before = known.chances("waits")[0]
    for _ in range(50):
        known.landed("other", 2, 2)
    assert known.chances("waits")[0] > before


# ---- costs -----------------------------------------------------------------------------------------------------------


def test_costs_are_the_prior_until_steps_were_timed() -> None:
    costs = StepCosts(prior_of(with_head), MOST)
    table = costs.table(4)
    for drafts in (0, 1, 3, 5):
        assert table.verify[4 * drafts] == pytest.approx(with_head(4, 4 * drafts, 0))
        assert table.drafting(drafts) == pytest.approx(250 * drafts)
    assert table.verify == sorted(table.verify)
    assert costs.wants_baseline(4)
    costs.timed(4, 0, 0, 9000.0)
    assert costs.wants_baseline(4)  # one time may be a capture
    costs.timed(4, 0, 0, 2 * with_head(4, 0, 0))
    assert costs.wants_baseline(4)  # and one of two the step after it, which seems to take no time
    costs.timed(4, 0, 0, 100.0)
    assert not costs.wants_baseline(4)
    assert costs.table(4).verify[0] == pytest.approx(min(9000.0, 2 * with_head(4, 0, 0)))
    # All of it is slower, as far as anybody knows.
    assert costs.table(4).verify[12] > 1.5 * table.verify[12]


def test_one_slow_step_changes_nothing() -> None:
    costs = StepCosts(prior_of(experts_like), MOST)
    for _ in range(5):
        costs.timed(1, 3, 3, experts_like(1, 3, 3))
    before = costs.table(1).verify[3]
    costs.timed(1, 3, 3, 80 * before)
    assert costs.table(1).verify[3] == before
    for _ in range(7):
        costs.timed(1, 3, 3, 2 * before)
    assert costs.table(1).verify[3] == pytest.approx(2 * before)


def test_steps_without_drafts_are_timed_again() -> None:
    costs = StepCosts(prior_of(experts_like), MOST)
    for _ in range(costs_module.BASELINE_SEEN):
        costs.timed(1, 0, 0, experts_like(1, 0, 0))
    for _ in range(costs_module.STALE):
        assert not costs.wants_baseline(1)
        costs.timed(1, 3, 3, experts_like(1, 3, 3))
    assert costs.wants_baseline(1)
    costs.timed(1, 0, 0, experts_like(1, 0, 0))
    assert not costs.wants_baseline(1)


def test_what_nobody_saw_for_long_is_forgotten() -> None:
    costs = StepCosts(prior_of(experts_like), MOST)
    for _ in range(7):
        costs.timed(1, 3, 3, 100 * experts_like(1, 3, 3))
    for _ in range(2 * costs_module.FORGOTTEN):
        costs.timed(1, 0, 0, experts_like(1, 0, 0))
    assert costs.table(1).verify[3] == pytest.approx(experts_like(1, 3, 3))


# ---- fixed, by the number of sequences -------------------------------------------------------------------------------


def test_fixed_lengths() -> None:
    requests = [Request(f"r{at}", [1], SamplingParams()) for at in range(2)]
    assert FixedLength(3).choose(requests, 99) == [3, 3]
    rule = FixedLength(3, [(17, 1), (1, 9), (65, 0)])
    assert [rule.choose(requests, n)[0] for n in (1, 16, 17, 64, 65, 500)] == [3, 3, 1, 1, 0, 0]


# ---- in an engine ----------------------------------------------------------------------------------------------------

LIMITS = Limits(page_size=4, window=6, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=2048)


class Clock:
    """Simulated time, which the steps of a mock model take."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedRunner(MockRunner):
    clock = Clock()

    def forward(self, schedule: Sequence[Work], tokens: Tensor | None = None) -> Logits:
        lengths = [len(work.drafts) for work in schedule]
        decoding = all(work.verifies for work in schedule)
        self.clock.now += experts_like(len(schedule), sum(lengths), max(lengths)) / 1e6 if decoding else 0.01
        return super().forward(schedule, tokens)


def simulate(luck: float, speculation: bool) -> tuple[float, System]:
    """Seconds of four requests in an engine, and the engine."""
    clock = TimedRunner.clock = Clock()
    drafter = KnowingDrafter(lambda tokens, count: alone(tokens, count, LIMITS.window), VOCAB, luck)
    rule = ByArithmetic(prior_of(experts_like), MOST)
    system = System(LIMITS, 2000, 2000, speculation=Speculation(drafter, MOST, rule, clock) if speculation else None)
    system.runner.__class__ = TimedRunner
    for at in range(4):
        system.submit(f"r{at}", [at, 5, 6], 300)
    system.run()
    for at in range(4):
        assert system.tokens(f"r{at}") == alone([at, 5, 6], 300, LIMITS.window)
    return clock.now, system


def test_an_engine_is_faster_with_a_good_drafter_and_hardly_slower_with_a_bad_one() -> None:
    plain, _ = simulate(0.0, False)
    bad, with_bad = simulate(0.0, True)
    good, with_good = simulate(0.95, True)
    assert bad <= 1.03 * plain
    assert good <= 0.75 * plain
    assert 0 < with_bad.engine.stats().num_draft_tokens < 60
    stats = with_good.engine.stats()
    assert stats.num_accepted_tokens > 600
    assert stats.draft_length > 1
    assert stats.drafted_per_pos[0] >= stats.drafted_per_pos[1] >= stats.accepted_per_pos[1]
    assert sum(stats.drafted_per_pos) == stats.num_draft_tokens
