"""The reference of sampling against the contract, and its kernels under the interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from microscale import hardware
from microscale.kernels.sampling import cost
from microscale.kernels.sampling.blocked import MAX_VOCAB, TritonSampling
from microscale.kernels.sampling.reference import (
    ReferenceSampling,
    adjust,
    cdf,
    find_status,
    find_top,
    keep,
    philox,
    sample,
    score,
)
from microscale.kernels.sampling.spec import PROMPT_BIT, Bias, History, SampleStatus, SamplingBatch, SamplingSpec
from microscale_lab.calls import run_sampling
from support.interpreter import run_cases, sixths_and_all

X = torch.tensor([1.0, 3.0, 2.0, 3.0, -1.0])


def batch(rows: int, temperature: float = 0.0, **given: object) -> SamplingBatch:
    same = {
        "temperature": temperature,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition": 1.0,
        "presence": 0.0,
        "frequency": 0.0,
    }
    tensors = {name: torch.full((rows,), value) for name, value in same.items()}
    tensors |= {"top_k": torch.zeros(rows, dtype=torch.int32), "seed": torch.arange(rows)}
    tensors["position"] = torch.zeros(rows, dtype=torch.int64)
    return SamplingBatch(**(tensors | {"draws": temperature > 0, "filters": False} | given))  # type: ignore[arg-type]


def test_philox_is_the_published_one() -> None:
    """The first two words of the known answers of Random123 for Philox4x32-10 with counter 0, key 0."""
    assert philox(0, 0) == 0x6627E8D5_E169C58D
    assert len({philox(seed, position) for seed in (0, 1, 2**40) for position in (0, 1, 2**40)}) == 9


def test_philox_is_uniform() -> None:
    bits = torch.tensor([philox(3, position) >> 60 for position in range(4000)])
    expected = 4000 / 16
    assert (
        float(((torch.bincount(bits, minlength=16) - expected) ** 2 / expected).sum()) < 37.7
    )  # 15 degrees, p = 0.001


def test_what_is_kept() -> None:
    def kept(top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, temperature: float = 1.0) -> list[int]:
        return keep(X, temperature, top_k, top_p, min_p).nonzero()[:, 0].tolist()

    assert kept() == kept(top_k=5) == kept(top_k=-1) == [0, 1, 2, 3, 4]
    assert kept(top_k=1) == [1]  # the lower id of two equals
    assert kept(top_k=3) == [1, 2, 3]
    weights = X.exp() / X.exp().sum()
    assert kept(top_p=1e-6) == [1]
    assert kept(top_p=float(weights[1]) * 0.999) == [1]
    assert kept(top_p=float(weights[1]) * 1.001) == [1, 3]
    assert kept(top_k=3, top_p=0.9) == [1, 2, 3]  # 0.844 of the three, so the third belongs to it
    assert kept(min_p=1.0) == [1, 3]
    assert kept(min_p=math.exp(-1) * 0.999) == [1, 2, 3]
    assert kept(min_p=math.exp(-1) * 0.999, temperature=0.5) == [1, 3]


def test_the_cumulated_probability_is_in_id_order() -> None:
    ends = cdf(X, keep(X, 2.0, 3, 1.0, 0.0), 2.0)
    weights = [0.0, 1.0, math.exp(-0.5), 1.0, 0.0]
    assert ends.tolist() == pytest.approx([sum(weights[: i + 1]) / sum(weights) for i in range(5)])


def test_adjustments_come_in_order() -> None:
    """Bias, then repetition, then frequency and presence, then the mask."""
    counts = torch.tensor([[2, PROMPT_BIT, PROMPT_BIT + 1, 0, 0]], dtype=torch.int32)
    b = batch(
        1,
        history=History(torch.zeros(1, dtype=torch.int32), counts),
        bias=Bias(torch.tensor([[0, 4, -1]], dtype=torch.int32), torch.tensor([[-2.0, 5.0, 9.0]])),
        allowed=torch.tensor([[0b10111]], dtype=torch.int32),
        repetition=torch.tensor([2.0]),
        frequency=torch.tensor([0.5]),
        presence=torch.tensor([0.25]),
    )
    want = [(1 - 2) * 2 - 0.5 * 2 - 0.25, 3 / 2, 2 / 2 - 0.5 - 0.25, -math.inf, -1 + 5]
    assert adjust(X[None], b)[0].tolist() == want
    assert sample(X[None], b).tokens.tolist() == [4]
    assert counts[0].tolist() == [2, PROMPT_BIT, PROMPT_BIT + 1, 0, 1]


def test_status_and_scores() -> None:
    rows = X.repeat(4, 1)
    rows[1, 2] = math.nan
    rows[2, 2] = math.inf
    rows[3] = -math.inf
    assert find_status(rows, rows).tolist() == [0, 1, 1, 1]
    assert find_status(rows[:1], torch.full((1, 5), -math.inf)).tolist() == [SampleStatus.NOTHING_ALLOWED]
    assert sample(rows, batch(4, 1.0)).status.tolist() == [0, 1, 1, 1]
    exact = torch.log_softmax(X.double(), -1)
    top = find_top(X[None], exact[None], 3)
    assert top.tokens.tolist() == [[1, 3, 2]]
    scored = score(X.repeat(2, 1), torch.tensor([4, 0]), top_logprobs=1)
    assert scored.logprobs.tolist() == pytest.approx([float(exact[4]), float(exact[0])])


def test_reference_draws_follow_their_distribution() -> None:
    draws = 2000
    b = batch(draws, 1.5, seed=torch.full((draws,), 11), position=torch.arange(draws))
    counts = torch.bincount(run_sampling(ReferenceSampling(), hardware.cpu(), X.repeat(draws, 1), b).tokens)
    expected = torch.softmax(X / 1.5, -1) * draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.47  # 4 degrees of freedom, p = 0.001


def test_refusals_and_cost() -> None:
    op = TritonSampling()
    assert op.supports(SamplingSpec(262144, 64), hardware.known("gb10")) is None
    assert str(MAX_VOCAB + 1) in (op.supports(SamplingSpec(MAX_VOCAB + 1, 1), hardware.known("gb10")) or "")
    assert "CPU" in (op.supports(SamplingSpec(100, 1), hardware.cpu()) or "").upper()
    assert cost.logit_bytes(SamplingSpec(1000, 3)) == 3 * (4000 + cost.ROW_BYTES)
    assert cost.history_bytes(SamplingSpec(1000, 3)) == 12000


@pytest.mark.slow
@sixths_and_all
def test_triton_under_the_interpreter(which: str) -> None:
    run_cases("cases_sampling.py", which, beside=__file__)
