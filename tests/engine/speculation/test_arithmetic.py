"""The best lengths of drafts by given costs and chances: against all others, and what must hold whatever is given."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microscale.engine.speculation.arithmetic import Costs, best_lengths, rate

ACCEPTANCE = st.floats(0.0, 1.0)
TIME = st.floats(0.0, 3.0)


def chances_of(acceptances: Sequence[float]) -> list[float]:
    return list(accumulate(acceptances, mul))


@st.composite
def batches(draw: st.DrawFn, requests: int = 3, most: int = 3) -> tuple[list[list[float]], Costs]:
    """Some requests, others that get no drafts, and a step that takes longer with each draft."""
    tokens = draw(st.integers(1, most))
    every = draw(st.lists(st.lists(ACCEPTANCE, min_size=tokens, max_size=tokens), min_size=1, max_size=requests))
    chances = [chances_of(own) for own in every]
    sequences = len(chances) + draw(st.integers(0, 3))
    more = draw(st.lists(TIME, min_size=tokens * len(chances), max_size=tokens * len(chances)))
    verify = list(accumulate([draw(st.floats(0.1, 5.0)), *more]))
    drafting = draw(st.lists(TIME, min_size=tokens, max_size=tokens))
    draft = list(accumulate([0.0, *drafting])) if draw(st.booleans()) else [0.0]
    return chances, Costs(sequences, verify, draft)


@settings(max_examples=300, deadline=None)
@given(batches())
def test_no_other_lengths_are_better(batch: tuple[list[list[float]], Costs]) -> None:
    chances, costs = batch
    found = best_lengths(chances, costs)
    every = product(*(range(len(own) + 1) for own in chances))
    best = max(rate(lengths, chances, costs) for lengths in every)
    assert rate(found, chances, costs) == pytest.approx(best, rel=1e-9)


@settings(max_examples=300, deadline=None)
@given(batches(requests=8, most=15), st.floats(1.0, 1.5))
def test_drafts_are_never_chosen_that_lose(batch: tuple[list[list[float]], Costs], least_gain: float) -> None:
    chances, costs = batch
    found = best_lengths(chances, costs, least_gain)
    assert all(0 <= length <= len(own) for length, own in zip(found, chances, strict=True))
    alone = rate([0] * len(chances), chances, costs)
    if any(found):
        assert rate(found, chances, costs) > least_gain * alone * (1 - 1e-12)


@settings(max_examples=300, deadline=None)
@given(batches(requests=1, most=8), st.integers(1, 6), st.integers(0, 7), ACCEPTANCE)
def test_a_better_drafter_gets_no_shorter_drafts(
    batch: tuple[list[list[float]], Costs], requests: int, place: int, better: float
) -> None:
    """Requests that are alike; one token becomes likelier, in the drafts of all."""
    [own], given_costs = batch
    before = [now / last if last else 0.0 for last, now in zip([1.0, *own], own, strict=False)]
    after = [max(each, better) if at == place else each for at, each in enumerate(before)]
    steps = [new - old for old, new in zip(given_costs.verify, given_costs.verify[1:], strict=False)]
    verify = list(accumulate([given_costs.verify[0], *(step for step in steps for _ in range(requests))]))
    costs = Costs(requests, verify, given_costs.draft)
    first, second = (sum(best_lengths([chances_of(each)] * requests, costs)) for each in (before, after))
    if rate([0] * requests, [own] * requests, costs) > 0 and first > second:
        # Equal to the last bit: either is best.
        rates = [rate(best_lengths([chances_of(e)] * requests, costs), [chances_of(after)] * requests, costs)
                 for e in (before, after)]  # fmt: skip
        assert rates[0] == pytest.approx(rates[1], rel=1e-9)


def test_many_sequences_have_none_where_every_token_costs_as_much() -> None:
    costs = Costs(64, [float(64 + n) for n in range(64 * 7 + 1)])
    assert best_lengths([[1.0] * 7] * 64, costs, 1.001) == [0] * 64
    assert costs.most_gain == pytest.approx(1.0)
    # With all experts in use already, more tokens are nearly free, and they are back.
    cheap = Costs(64, [64 + 0.1 * n for n in range(64 * 7 + 1)])
    assert min(best_lengths([chances_of([0.5] * 7)] * 64, cheap)) >= 2


@settings(max_examples=100, deadline=None)
@given(batches(requests=12, most=4), st.integers(1, 4))
def test_few_sizes_of_steps(batch: tuple[list[list[float]], Costs], sizes: int) -> None:
    """Of all numbers of drafts that are tried the best, by sums of the likeliest tokens."""
    chances, costs = batch
    every = max(1, len(chances) // sizes)
    found = best_lengths(chances, Costs(costs.sequences, costs.verify, sizes=sizes))
    assert sum(found) % every == 0
    likeliest = sorted((chance for own in chances for chance in own), reverse=True)
    best = max((costs.sequences + sum(likeliest[:n])) / costs.verify[n] for n in range(0, len(likeliest) + 1, every))
    assert rate(found, chances, Costs(costs.sequences, costs.verify)) == pytest.approx(best, rel=1e-9)


def test_the_likelier_draft_is_longer() -> None:
    costs = Costs(2, [10.0 + 3 * n for n in range(9)])
    sure, unsure = chances_of([0.95] * 4), chances_of([0.3] * 4)
    assert best_lengths([sure, unsure], costs) == [4, 0]
    assert best_lengths([unsure, unsure], costs) == [0, 0]


def test_drafting_counts_by_the_longest_draft() -> None:
    """A head makes a pass for each token of the longest draft; others draft in the same passes."""
    verify = [10.0 + n for n in range(9)]
    chances = [chances_of([0.9] * 4)] * 2
    free = best_lengths(chances, Costs(2, verify))
    assert free == [4, 4]
    paid = best_lengths(chances, Costs(2, verify, [0.0, 1.0, 6.0, 12.0, 18.0]))
    assert paid == [1, 1]
    assert best_lengths(chances, Costs(2, verify, [0.0, 50.0, 50.0, 50.0, 50.0])) == [0, 0]
