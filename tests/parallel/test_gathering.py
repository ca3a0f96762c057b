"""The likeliest token and its log-probability from what blocks, or ranks, say of themselves alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from microscale.backends.ops import Logits, Status
from microscale.backends.ranks import as_one_block, likeliest, summarise
from microscale.engine.ranks.gathering import takes_likeliest
from microscale.engine.request import Request
from microscale.engine.sampler import Sampler
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.work import Work
from microscale.parallel.sharding import Shard, split_vocabulary
from support.sampling import sampling_on_cpu

VOCAB = 5000


def spread(values: Tensor, world: int) -> Logits:
    """What rank 0 holds when each rank has told its one block."""
    told = []
    for rank in range(world):
        rows = split_vocabulary(VOCAB, Shard(rank, world))
        largest, at, total = as_one_block(summarise(values[:, rows.start : rows.stop], 128))
        told.append((largest, at + rows.start, total))
    largest, at, total = (torch.stack(each, dim=1) for each in zip(*told, strict=True))
    first = split_vocabulary(VOCAB, Shard(0, world))
    return Logits(values[:, : len(first)], largest, at.int(), total, len(first))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_likeliest_token_is_found(world: int) -> None:
    values = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(0)) * 4
    values[3, [17, 4000]] = 60.0  # a tie: the lower one
    values[4, 4999] = 90.0
    found = likeliest(spread(values, world))
    assert found.tokens.tolist() == values.argmax(dim=1).tolist()
    assert found.tokens[3] == 17
    wanted = values.double().log_softmax(dim=1).amax(dim=1)
    assert torch.allclose(found.logprobs.double(), wanted, atol=1e-5)
    assert set(found.status.tolist()) == {Status.OK}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_told(bad: float) -> None:
    values = torch.zeros(2, VOCAB)
    values[1, 4321] = bad
    assert likeliest(spread(values, 2)).status.tolist() == [Status.OK, Status.NON_FINITE]


PLAIN = SamplingParams(4)


@pytest.mark.parametrize(
    ("params", "suffices"),
    [
        (PLAIN, True),
        (SamplingParams(4, seed=3, top_k=5, top_p=0.5), True),  # of a temperature of 0 that changes nothing
        (SamplingParams(4, 0.5), False),
        (SamplingParams(4, logprobs=0), False),
        (SamplingParams(4, prompt_logprobs=0), False),
        (SamplingParams(4, logit_bias={3: 1.0}), False),
        (SamplingParams(4, min_tokens=2), False),
        (SamplingParams(4, repetition_penalty=1.2), False),
        (SamplingParams(4, presence_penalty=0.5), False),
        (SamplingParams(4, grammar="start: /a/"), False),
    ],
)
def test_who_needs_all_logits(params: SamplingParams, suffices: bool) -> None:
    rows = [Work(Request("a", [1, 2], PLAIN), 0, 2), Work(Request("b", [1, 2], params), 0, 2)]
    assert takes_likeliest(rows) == suffices
    # One that gives no logits yet asks for none; a scored prompt gives them at once.
    waits = [Work(Request("b", [1, 2, 3], params), 0, 2)]
    assert takes_likeliest(waits) == (suffices or params.prompt_logprobs is None)


def test_rows_that_need_more_are_never_drawn_from_blocks() -> None:
    sampler = Sampler(sampling_on_cpu(VOCAB), VOCAB, torch.device("cpu"))
    logits = spread(torch.randn(1, VOCAB), 2)
    assert sampler.sample(logits.values, [sampler.add(PLAIN)], logits)
    with pytest.raises(AssertionError, match="need all logits"):
        sampler.sample(logits.values, [sampler.add(SamplingParams(4, 1.0))], logits)
