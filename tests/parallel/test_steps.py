"""A schedule that was sent and read again is rank 0's own, contradictions are refused, and rank 0 gets all logits."""

from __future__ import annotations

import gc
import math
import random
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from microscale.engine.limits import Limits
from microscale.engine.pages import PagePool
from microscale.engine.ranks.messages import Draft, HeldPages, RankRow, RankStep, decode_for_follower, encode
from microscale.engine.ranks.steps import MirroredPages, StepReader, StepWriter, largest_suffice
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.sampling_state import Sampler
from microscale.engine.scheduler import Scheduler
from microscale.engine.work import Work
from microscale.errors import BadMessage
from microscale.models.config import PAGED
from microscale.parallel.sharding import Shard, split_vocabulary
from microscale.planning.ops import Logits, SampleStatus
from microscale.planning.ranks import as_one_block, likeliest, summarise
from support.sampling import sampling_on_cpu

PAGES = 17
SIZE = 4


def send(step: RankStep) -> RankStep:
    """Over the wire."""
    found = decode_for_follower(encode(step)[4:])
    assert isinstance(found, RankStep)
    return found


def same(work: Work, mirrored: Work) -> None:
    names = ("first", "count", "ahead", "drafts", "num_logits", "decodes", "verifies")
    for name in names:
        assert getattr(work, name) == getattr(mirrored, name), name
    if not work.ahead:
        assert list(work.tokens) == list(mirrored.tokens)


@pytest.mark.usefixtures("admits_until_pages_run_out")
@pytest.mark.parametrize("seed", range(2))
def test_every_schedule_arrives_unchanged(seed: int) -> None:
    """With few pages, prefix hits, rejected drafts and requests that end."""
    chance = random.Random(seed)
    pools = {kind: PagePool(PAGES) for kind in PAGED}
    scheduler = Scheduler(pools, Limits(SIZE, 6, 4, 12, 200, 64))
    held = {kind: MirroredPages(PAGES) for kind in PAGED}
    writer, reader = StepWriter(pools), StepReader(held)
    waiting = 20
    while waiting or any(True for _ in scheduler.requests()):
        if waiting and chance.random() < 0.6:
            waiting -= 1
            prompt = [1] * chance.choice([1, 8, 17]) + [chance.randrange(9) for _ in range(chance.randrange(1, 20))]
            params = SamplingParams(chance.randrange(1, 30), prompt_logprobs=chance.choice([None, None, 1]))
            scheduler.add(Request(f"r{waiting}", prompt, params))
        drafts = {
            r.request_id: tuple(chance.randrange(9) for _ in range(chance.randrange(3))) for r in scheduler.drafted()
        }
        schedule = scheduler.schedule(drafts)
        mirrored = reader.read(send(writer.write(schedule, ahead=False)))
        assert len(mirrored) == len(schedule)
        for work, other in zip(schedule, mirrored, strict=True):
            same(work, other)
            for kind, pool in pools.items():
                assert list(pool.pages_of(work.request.request_id)) == list(
                    held[kind].pages_of(other.request.request_id)
                )
        accepted = {
            work.request.request_id: work.drafts[: chance.randint(0, len(work.drafts))]
            for work in schedule
            if work.drafts
        }
        scheduler.computed(schedule, accepted)
        for work in schedule:
            request = work.request
            if request.scoring and work.first + work.count > request.num_scored:
                request.num_scored = min(work.first + work.count, len(request.prompt) - 1)
            if work.wants_logits:
                request.tokens += [*accepted.get(request.request_id, ()), chance.randrange(9)]
                if request.num_generated >= request.params.max_tokens:
                    scheduler.remove(request.request_id)
    assert scheduler.num_preemptions > 0
    del schedule, request, work
    gc.collect()
    reader.read(writer.write([], ahead=False))
    # Nothing is kept of requests that are gone.
    assert not reader._requests
    assert not any(pool._owned for pool in held.values())


def test_tokens_that_rank_0_has_not_read_are_left_out() -> None:
    pools = {kind: PagePool(PAGES) for kind in PAGED}
    for pool in pools.values():
        pool.grow("a", 2)
    writer, reader = StepWriter(pools), StepReader({kind: MirroredPages(PAGES) for kind in PAGED})
    request = Request("a", [1, 2, 3], SamplingParams(4))
    reader.read(send(writer.write([Work(request, 0, 3)], ahead=False)))
    work = Work(request, 3, 1, ahead=True)
    (other,) = reader.read(send(writer.write([work], ahead=True)))
    same(work, other)


KEPT = (HeldPages(0, 0, (1,)),) * len(PAGED)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (RankRow(0, 0, 2, (1,), (), 1, False, KEPT), "has 1 tokens for 2 places"),
        (RankRow(0, 0, 1, (1,), (), 3, False, KEPT), "needs 3 rows of logits and has 1"),
        (RankRow(0, 0, 1, (1,), (), 1, False, (HeldPages(0, 0, (PAGES,)),) * 2), f"is given page {PAGES} of {PAGES}"),
        (RankRow(0, 0, 1, (1,), (), 1, False, (HeldPages(0, 2, ()),) * 2), "must keep 2 pages and has 0"),
    ],
)
def test_a_contradiction_is_refused(row: RankRow, said: str) -> None:
    reader = StepReader({kind: MirroredPages(PAGES) for kind in PAGED})
    with pytest.raises(BadMessage, match=said):
        reader.read(send(RankStep((row,))))


def test_a_scored_prompt_that_goes_on() -> None:
    """A chunk of a scored prompt gives logits, but no token is sampled after it."""
    pools = {kind: PagePool(8) for kind in PAGED}
    reader = StepReader({kind: MirroredPages(8) for kind in PAGED})
    request = Request("r", [5, 6, 7, 8, 9], SamplingParams(1, prompt_logprobs=0))
    [work] = reader.read(StepWriter(pools).write([Work(request, 0, 3)], ahead=False))
    assert (work.num_logits, work.wants_logits) == (3, False)
    assert work.request.tokens == [5, 6, 7, 8]


@pytest.mark.parametrize("change", [{"num_tokens": -1}, {"first_rows": [-1]}, {"most": None}, {"extra": 1}])
def test_messages_are_bounded(change: dict[str, Any]) -> None:
    good = msgspec.to_builtins(Draft((0, None), 1, 2))
    assert decode_for_follower(msgspec.msgpack.encode(good)) == Draft((0, None), 1, 2)
    with pytest.raises(BadMessage):
        decode_for_follower(msgspec.msgpack.encode(good | change))


VOCAB = 5000


def spread(values: Tensor, world: int) -> Logits:
    """What rank 0 holds when each rank has sent its block."""
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
    assert set(found.status.tolist()) == {SampleStatus.OK}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_reported(bad: float) -> None:
    values = torch.zeros(2, VOCAB)
    values[1, 4321] = bad
    assert likeliest(spread(values, 2)).status.tolist() == [SampleStatus.OK, SampleStatus.NON_FINITE]


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
def test_which_requests_need_all_logits(params: SamplingParams, suffices: bool) -> None:
    rows = [Work(Request("a", [1, 2], PLAIN), 0, 2), Work(Request("b", [1, 2], params), 0, 2)]
    assert largest_suffice(rows) == suffices
    # One that gives no logits yet asks for none; a scored prompt gives them at once.
    waits = [Work(Request("b", [1, 2, 3], params), 0, 2)]
    assert largest_suffice(waits) == (suffices or params.prompt_logprobs is None)


def test_rows_that_need_more_are_never_drawn_from_blocks() -> None:
    sampler = Sampler(sampling_on_cpu(VOCAB), VOCAB, torch.device("cpu"))
    logits = spread(torch.randn(1, VOCAB), 2)
    assert sampler.sample(logits.values, [sampler.add(PLAIN)], logits)
    with pytest.raises(AssertionError, match="need all logits"):
        sampler.sample(logits.values, [sampler.add(SamplingParams(4, 1.0))], logits)
