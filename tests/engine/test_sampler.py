"""Choosing a token: greedy, seeded, distributed as the logits say, and refusing nonsense."""

from __future__ import annotations

import math

import pytest
import torch

from microscale.engine.sampler import Sampler, SamplingParams
from microscale.errors import BadLogits, BadRequest

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0])


def test_greedy_takes_the_largest_and_its_logprob() -> None:
    token, logprob = Sampler(SamplingParams()).sample(LOGITS)
    assert token == 1
    assert logprob == pytest.approx(2 - math.log(sum(math.exp(x) for x in LOGITS.tolist())))


def test_a_seed_gives_the_same_tokens() -> None:
    def draw(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed))
        return [sampler.sample(LOGITS)[0] for _ in range(50)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_tempered_distribution(temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature, seed=1))
    draws = 4000
    counts = torch.bincount(torch.tensor([sampler.sample(LOGITS)[0] for _ in range(draws)]), minlength=4)
    expected = torch.softmax(LOGITS / temperature, -1) * draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 16.27  # 3 degrees of freedom, p = 0.001


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(BadLogits):
        Sampler(SamplingParams()).sample(torch.tensor([0.0, bad]))


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 0}, {"temperature": -1.0}, {"temperature": math.nan}, {"seed": -1}, {"seed": 2**63}]
)
def test_parameters_out_of_range_are_refused(wrong: dict) -> None:
    with pytest.raises(BadRequest, match=next(iter(wrong))):
        SamplingParams(**wrong)
