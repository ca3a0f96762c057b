"""The length of drafts, in simulated steps: what drafts cost and how likely they are accepted is given, and the rule
must find the right length. Nothing here depends on a clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from microscale.engine.limits import DRAFTED_SEQUENCES
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.length import AWAKE, REST, AutomaticLength, DraftCosts, FixedLength, Length
from microscale.hardware import known
from microscale.hardware.draft_costs import host_ms, step_curve

MOST = 7
MEASURED = {
    "gpt-oss-20b": {
        1: (1.32, 1.75, 2.01, 2.31, 2.51, 2.66, 2.8, 2.91),
        4: (2.3, 2.87, 3.36, 3.58, 4.09, 4.19, 4.27, 4.36),
        16: (3.6, 4.33, 4.76, 4.92, 5.03, 5.12, 5.3, 5.47),
        64: (4.99, 5.59, 6.72, 7.46, 8.53, 9.09, 10.2, 11.3),
    },
    "gpt-oss-120b": {
        1: (1.89, 2.51, 3.16, 3.59, 4.01, 4.39, 4.93, 5.27),
        4: (3.55, 5.21, 6.68, 8.08, 9.36, 10.3, 11.2, 12),
        16: (7.98, 11.9, 14.5, 16.1, 18.7, 19.3, 19.9, 20.2),
        64: (16.3, 20.4, 21.8, 22.8, 24, 24.9, 26.1, 27.2),
    },
}
"""Milliseconds of a step on an H200 by the number of sequences, with 0 to 7 drafts each (docs/lab/drafts.md)."""
EXPERTS = {"gpt-oss-20b": 32, "gpt-oss-120b": 128}
CASES = [(model, sequences) for model, table in MEASURED.items() for sequences in table]
H200 = known("h200")


def costs_of(model: str, **options: object) -> DraftCosts:
    return DraftCosts(step_curve(EXPERTS[model], 4), **options)  # type: ignore[arg-type]


def expected_tokens(acceptance: float, drafts: int) -> float:
    return sum(acceptance**place for place in range(drafts + 1))


class Simulation:
    """A batch that decodes for ever, with the measured times."""

    def __init__(self, rule: Length, row: Sequence[float], sequences: int, seed: int = 0) -> None:
        self.rule, self._row = rule, row
        self.requests = [Request(f"r{at}", [1], SamplingParams()) for at in range(sequences)]
        self.lengths: list[list[int]] = []
        self._chance = random.Random(seed)

    def run(self, steps: int, acceptance: float | Sequence[float]) -> float:
        """Tokens per millisecond. A step counts with the tokens that its lengths give on average."""
        count = len(self.requests)
        chances = [acceptance] * count if isinstance(acceptance, float) else acceptance
        tokens, ms = 0.0, 0.0
        for _ in range(steps):
            lengths = list(self.rule.choose(self.requests, count))
            assert lengths == list(self.rule.choose(self.requests, count))
            assert all(0 <= length <= MOST for length in lengths)
            self.rule.stepped()
            for request, length, chance in zip(self.requests, lengths, chances, strict=True):
                if length:
                    accepted = next((at for at in range(length) if self._chance.random() >= chance), length)
                    self.rule.landed(request, length, accepted)
                tokens += expected_tokens(chance, length)
            low, part = divmod(sum(lengths), count)
            high = self._row[min(low + 1, MOST)]
            ms += self._row[low] + (high - self._row[low]) * part / count
            self.lengths.append(lengths)
        return tokens / ms


def simulate(model: str, sequences: int, seed: int = 0) -> Simulation:
    return Simulation(AutomaticLength(costs_of(model), MOST), MEASURED[model][sequences], sequences, seed)


def best_fixed(row: Sequence[float], sequences: int, acceptance: float) -> float:
    return max(sequences * expected_tokens(acceptance, drafts) / ms for drafts, ms in enumerate(row))


# ---- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "sequences"), CASES)
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.5, 0.7, 0.9])
def test_it_is_about_as_good_as_the_best_fixed_length(model: str, sequences: int, acceptance: float) -> None:
    """And a drafter that is never right costs at most 3 %."""
    simulation, row = simulate(model, sequences), MEASURED[model][sequences]
    simulation.run(150, acceptance)
    rate = simulation.run(400, acceptance)
    assert rate >= 0.95 * best_fixed(row, sequences, acceptance)
    assert rate >= 0.97 * sequences / row[0]


@pytest.mark.parametrize(("model", "sequences"), CASES)
def test_a_text_that_becomes_predictable_is_noticed(model: str, sequences: int) -> None:
    simulation, row = simulate(model, sequences), MEASURED[model][sequences]
    simulation.run(400, 0.0)
    assert sum(map(any, simulation.lengths[-200:])) <= 20
    simulation.run(300, 0.9)
    assert simulation.run(200, 0.9) >= 0.95 * best_fixed(row, sequences, 0.9)
    simulation.run(60, 0.0)
    assert simulation.run(300, 0.0) >= 0.96 * sequences / row[0]


def test_each_request_has_its_own_acceptance() -> None:
    simulation = simulate("gpt-oss-20b", 4)
    simulation.run(200, [0.95, 0.95, 0.05, 0.05])
    means = [sum(step[at] for step in simulation.lengths[-100:]) / 100 for at in range(4)]
    assert min(means[:2]) > 3
    assert max(means[2:]) < 0.5
    # If the other texts become predictable too, that is noticed.
    simulation.run(400, 0.95)
    assert min(map(min, simulation.lengths[-100:])) > 3


def test_the_same_luck_gives_the_same_lengths() -> None:
    first, second = simulate("gpt-oss-20b", 4, 7), simulate("gpt-oss-20b", 4, 7)
    for simulation in (first, second):
        simulation.run(200, 0.6)
    assert first.lengths == second.lengths


def test_a_length_is_kept_while_another_is_hardly_better() -> None:
    simulation = simulate("gpt-oss-20b", 64)
    simulation.run(500, 0.7)
    steps = [step for step in simulation.lengths[100:] if any(step)]
    changes = sum(before != after for before, after in pairwise(steps))
    assert changes < 20


def test_dear_drafts_are_not_even_probed() -> None:
    costs = costs_of("gpt-oss-20b", head_ms=10.0)
    assert min(costs.ratio(1, drafts) - drafts for drafts in range(1, MOST + 1)) > 1
    simulation = Simulation(AutomaticLength(costs, MOST), MEASURED["gpt-oss-20b"][1], 1)
    simulation.run(300, 1.0)
    assert not any(map(any, simulation.lengths))


def test_a_head_rests_while_drafts_are_not_worth_it() -> None:
    rule = AutomaticLength(costs_of("gpt-oss-20b", head_ms=0.1), MOST)
    simulation = Simulation(rule, MEASURED["gpt-oss-20b"][1], 1)
    awake = []
    for _ in range(2 * (AWAKE + REST)):
        awake.append(not rule.rests(1))
        if awake[-1]:
            simulation.run(1, 0.0)
        else:
            rule.stepped()
    assert AWAKE <= sum(awake[: AWAKE + REST]) <= AWAKE + 20  # drafts are tried at first
    assert sum(awake) < 2 * AWAKE + 40
    while not rule.rests(1):
        simulation.run(1, 0.0)
    # With other numbers of sequences drafts may be worth it at the same acceptance.
    assert rule.rests(64) is (rule._shared.value < 0.2)


def test_a_pass_of_a_head_with_experts_costs_more_for_more_sequences() -> None:
    curve = step_curve(256, 8)
    dense, experts = (DraftCosts(curve, head_ms=0.1, head_has_experts=has) for has in (False, True))
    assert experts.ms(1, 3, 3) == dense.ms(1, 3, 3)
    assert experts.ms(16, 48, 3) - dense.ms(16, 48, 3) == pytest.approx(3 * 0.1 * (curve.at(16) / curve.at(1) - 1))


def test_a_head_rests_while_more_sequences_run_than_have_slots_for_states() -> None:
    rule = AutomaticLength(DraftCosts(step_curve(256, 8), states_ms=1e-4), 3)
    requests = [Request(str(number), [1], SamplingParams()) for number in range(DRAFTED_SEQUENCES + 1)]
    assert any(rule.choose(requests[1:], DRAFTED_SEQUENCES))
    for _ in range(AWAKE):
        assert not rule.rests(len(requests))
        assert not any(rule.choose(requests, len(requests)))
        rule.stepped()
    assert rule.rests(len(requests))
    assert not rule.rests(DRAFTED_SEQUENCES)


def test_a_head_that_is_worth_it_never_rests() -> None:
    simulation = simulate("gpt-oss-20b", 1)
    for _ in range(300):
        simulation.run(1, 0.7)
        assert not simulation.rule.rests(1)


def test_fixed_lengths() -> None:
    requests = [Request(f"r{at}", [1], SamplingParams()) for at in range(2)]
    assert FixedLength(3).choose(requests, 99) == [3, 3]
    rule = FixedLength(3, [(17, 1), (1, 9), (65, 0)])
    assert [rule.choose(requests, n)[0] for n in (1, 16, 17, 64, 65, 500)] == [3, 3, 1, 1, 0, 0]
    assert not rule.rests(1)


# ---- costs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "sequences"), CASES)
def test_the_table_is_what_was_measured(model: str, sequences: int) -> None:
    costs, row = costs_of(model), MEASURED[model][sequences]
    for drafts, ms in enumerate(row):
        assert costs.ratio(sequences, drafts) == pytest.approx(ms / row[0], rel=0.1), drafts


def test_a_step_costs_more_with_every_token_and_drafter() -> None:
    for experts, per_token in ((32, 4), (128, 4), (128, 8), (64, 6), (1, 1)):
        curve = step_curve(experts, per_token)
        times = [curve.at(tokens) for tokens in range(1, 2000)]
        assert times == sorted(times)
    assert step_curve(128, 8).model == "gemma-4-26b-a4b"
    plain, chain, block = (costs_of("gpt-oss-20b", **options) for options in
                           ({}, {"head_ms": 0.1}, {"head_ms": 0.1, "one_pass": True}))  # fmt: skip
    assert chain.ms(2, 6, 3) - plain.ms(2, 6, 3) == pytest.approx(0.3)
    assert block.ms(2, 6, 3) - plain.ms(2, 6, 3) == pytest.approx(0.1)
    assert plain.ms(2) == chain.ms(2) == block.ms(2)


def test_the_host_is_waited_for_where_drafts_are_read() -> None:
    """As long on any GPU, so for a smaller part of a slower GPU's steps, and not at all on a CPU."""
    read = costs_of("gpt-oss-20b", host_ms=lambda sequences, drafts: host_ms(sequences, drafts, H200))
    assert read.ms(1, 3, 3) - costs_of("gpt-oss-20b").ms(1, 3, 3) == pytest.approx(0.26, abs=0.01)
    assert read.ms(1) == costs_of("gpt-oss-20b").ms(1)
    assert host_ms(1, 3, known("gb10")) < 0.1 * host_ms(1, 3, H200)
