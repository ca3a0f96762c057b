"""Requests and their tokens: greedy, seeded, distributed as asked, held back, banned, and refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from microscale.engine.sampling_params import MAX_BIAS, SamplingParams
from microscale.engine.sampling_state import Sampler
from microscale.engine.token_readback import NextToken
from microscale.errors import BadLogits, BadRequest
from microscale.kernels.dense.spec import Logits
from microscale.kernels.sampling.spec import Sampled, SamplingBatch
from support.sampling import sampling_on_cpu

CPU = torch.device("cpu")
LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0])
EOS = 1


def new_sampler(vocab: int = 4) -> Sampler:
    return Sampler(sampling_on_cpu(vocab), vocab, CPU, eos_token_ids=(EOS,))


def choose(logits: Tensor = LOGITS, prompt: tuple[int, ...] = (), **params: Any) -> NextToken:
    sampler = new_sampler(len(logits))
    return sampler.sample(logits[None], [sampler.add(SamplingParams(**params), prompt)])[0]


def draw(count: int, logits: Tensor = LOGITS, prompt: tuple[int, ...] = (), **params: Any) -> list[int]:
    """One request's tokens from the same logits again and again."""
    sampler = new_sampler(len(logits))
    request = sampler.add(SamplingParams(**params), prompt)
    return [sampler.sample(logits[None], [request])[0].token for _ in range(count)]


def test_greedy_takes_the_largest_and_its_logprob() -> None:
    choice = choose()
    assert choice.token == 1
    assert choice.logprob == pytest.approx(2 - math.log(sum(math.exp(x) for x in LOGITS.tolist())))


def test_greedy_rows_send_no_numbers() -> None:
    """They are the same tensors in every step, whatever else the requests say; one row that draws has its own."""
    sampling, batches = sampling_on_cpu(4), []

    def keep(logits: Tensor, batch: SamplingBatch, blocks: Logits | None = None) -> Sampled:
        batches.append(batch)
        return sampling(logits, batch, blocks)

    sampler = Sampler(keep, 4, CPU, eos_token_ids=(EOS,))  # type: ignore[arg-type]
    plain, cut = sampler.add(SamplingParams()), sampler.add(SamplingParams(top_k=1, top_p=0.1, min_tokens=9))
    drawing = sampler.add(SamplingParams(temperature=0.5))
    for rows in ([plain, cut], [cut, plain], [plain, drawing]):
        sampler.sample(LOGITS.expand(2, 4), rows)
    assert batches[0].seed.data_ptr() == batches[1].seed.data_ptr() != batches[2].seed.data_ptr()
    assert batches[0].temperature.tolist() == [0.0, 0.0]
    assert batches[2].temperature.tolist() == [0.0, 0.5]


def test_a_seed_gives_the_same_tokens() -> None:
    assert draw(50, temperature=1.0, seed=7) == draw(50, temperature=1.0, seed=7)
    assert draw(50, temperature=1.0, seed=7) != draw(50, temperature=1.0, seed=8)
    assert draw(50, temperature=1.0) != draw(50, temperature=1.0)


def test_a_seed_gives_the_same_tokens_in_any_batch() -> None:
    """The request alone, and as row 2 of 4 that come and go."""
    alone = draw(12, temperature=1.0, seed=3, top_p=0.9)
    sampler = new_sampler()
    mine = sampler.add(SamplingParams(temperature=1.0, seed=3, top_p=0.9))
    found = []
    for turn in range(12):
        others = [sampler.add(SamplingParams(temperature=0.5, presence_penalty=0.1 * (turn % 2))) for _ in range(3)]
        rows = [others[0], others[1], mine, others[2]]
        found.append(sampler.sample(LOGITS.expand(4, 4), rows)[2].token)
        for other in others:
            sampler.remove(other)
    assert found == alone


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_tempered_distribution(temperature: float) -> None:
    draws = 1000
    counts = torch.bincount(torch.tensor(draw(draws, temperature=temperature, seed=1)), minlength=4)
    expected = torch.softmax(LOGITS / temperature, -1) * draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 16.27  # 3 degrees of freedom, p = 0.001


def test_cuts() -> None:
    assert set(draw(60, temperature=5.0, seed=1, top_k=2)) == {1, 2}
    assert set(draw(60, temperature=5.0, seed=1, top_p=0.5)) == {1, 2}
    assert set(draw(60, temperature=5.0, seed=1, min_p=0.7)) == {1, 2}
    assert set(draw(60, temperature=5.0, seed=1, top_k=-1)) == {0, 1, 2, 3}


def test_penalties_see_prompt_and_output() -> None:
    """Greedy over equal steps of 1: a token that was produced falls behind the next."""
    logits = torch.tensor([4.0, 3.5, 3.0, 2.5])
    assert draw(4, logits) == [0, 0, 0, 0]
    assert draw(4, logits, presence_penalty=1.2) == [0, 1, 2, 0]
    assert draw(5, logits, frequency_penalty=0.4) == [0, 0, 1, 0, 1]
    assert draw(3, logits, repetition_penalty=2.0) == [0, 1, 2]
    assert draw(2, logits, prompt=(0, 1, 1), repetition_penalty=2.0) == [2, 3]
    assert draw(2, logits, prompt=(0, 1, 1), presence_penalty=1.2) == [0, 1]


def test_counts_grow_and_are_reused_clean() -> None:
    sampler = new_sampler()
    params = SamplingParams(presence_penalty=2.0)
    requests = [sampler.add(params) for _ in range(20)]
    assert {c.token for c in sampler.sample(LOGITS.expand(20, 4), requests)} == {1}
    for request in requests:
        sampler.remove(request)
    again = [sampler.add(params) for _ in range(20)]
    assert {c.token for c in sampler.sample(LOGITS.expand(20, 4), again)} == {1}


def test_bias_and_min_tokens() -> None:
    assert choose(logit_bias={3: 100.0}).token == 3
    assert choose(logit_bias={1: -100.0}).token == 2
    # The end token 1 and the stop token 2 are held back for two tokens.
    assert draw(3, min_tokens=2, stop_token_ids=(2,)) == [0, 0, 1]
    assert draw(1, min_tokens=2, ignore_eos=True, stop_token_ids=(2,)) == [1]


def test_logprobs_of_the_likeliest_and_of_a_prompt() -> None:
    exact = torch.log_softmax(LOGITS.double(), -1).tolist()
    choice = choose(temperature=2.0, seed=0, top_k=1, logprobs=3)
    assert choice.logprob == pytest.approx(exact[1])
    assert [token for token, _ in choice.top] == [1, 2, 0]
    assert [logprob for _, logprob in choice.top] == pytest.approx([exact[1], exact[2], exact[0]])
    scored = new_sampler().prompt_logprobs(LOGITS.expand(2, 4), [3, 2], top=1)
    assert [c.logprob for c in scored] == pytest.approx([exact[3], exact[2]])
    likeliest: object = (pytest.approx((1, exact[1])),)
    assert all(c.top == likeliest for c in scored)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_end_their_request_and_no_other(bad: float) -> None:
    sampler = new_sampler()
    requests = [sampler.add(SamplingParams(temperature=t, seed=5)) for t in (0.0, 1.0, 1.0)]
    logits = LOGITS.repeat(3, 1)
    logits[1, 3] = bad
    good, broken, other = sampler.sample(logits, requests)
    with pytest.raises(BadLogits):
        broken.check()
    good.check()
    other.check()
    assert (good.token, other.token) == (1, draw(1, temperature=1.0, seed=5)[0])


def test_a_token_may_be_impossible_but_not_all() -> None:
    assert choose(torch.tensor([-math.inf, -5.0, -math.inf]), temperature=1.0, top_p=0.5).token == 1
    with pytest.raises(BadLogits):
        choose(torch.full((3,), -math.inf)).check()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0}, {"temperature": -1.0}, {"temperature": math.nan}, {"seed": -1}, {"seed": 2**63},
        {"top_k": -2}, {"top_p": 0.0}, {"top_p": 1.01}, {"top_p": math.nan}, {"min_p": -0.1}, {"min_p": 1.1},
        {"repetition_penalty": 0.0}, {"presence_penalty": 2.1}, {"frequency_penalty": -2.1},
        {"logit_bias": {3: 101.0}}, {"logit_bias": {3: math.nan}},
        {"logit_bias": dict.fromkeys(range(MAX_BIAS + 1), 0.0)},
        {"min_tokens": -1}, {"min_tokens": 17}, {"logprobs": 21}, {"prompt_logprobs": -1},
    ],
    ids=lambda w: str(w)[:40],
)  # fmt: skip
def test_parameters_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=next(iter(wrong))):
        SamplingParams(**wrong)


@pytest.mark.parametrize("wrong", [{"logit_bias": {4: 1.0}}, {"stop_token_ids": (-1,)}], ids=str)
def test_tokens_outside_the_vocabulary_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=r"not in the vocabulary of 4"):
        new_sampler().add(SamplingParams(**wrong))
