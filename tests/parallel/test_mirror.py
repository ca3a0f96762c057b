"""A schedule that was told and put together again is the one that rank 0 has; what contradicts itself is refused."""

from __future__ import annotations

import gc
import random

import pytest

from microscale.engine.limits import Limits
from microscale.engine.pages import PagePool
from microscale.engine.ranks.messages import Held, Row, Step, decode_for_follower, encode
from microscale.engine.ranks.mirror import HeldPages, Mirror, Teller
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.scheduler import Scheduler
from microscale.engine.work import Work
from microscale.errors import BadMessage
from microscale.models.config import LayerKind

PAGES = 17
SIZE = 4


def send(step: Step) -> Step:
    """Over the wire."""
    found = decode_for_follower(encode(step)[4:])
    assert isinstance(found, Step)
    return found


def same(work: Work, mirrored: Work) -> None:
    names = ("first", "count", "ahead", "drafts", "num_logits", "decodes", "verifies")
    for name in names:
        assert getattr(work, name) == getattr(mirrored, name), name
    if not work.ahead:
        assert list(work.tokens) == list(mirrored.tokens)


@pytest.mark.parametrize("seed", range(4))
def test_every_schedule_arrives_as_it_is(seed: int) -> None:
    """A scheduler with few pages, prefixes that are found again, drafts that are dropped, requests that end."""
    chance = random.Random(seed)
    pools = {kind: PagePool(PAGES) for kind in LayerKind}
    scheduler = Scheduler(pools, Limits(SIZE, 6, 4, 12, 200, 64))
    held = {kind: HeldPages(PAGES) for kind in LayerKind}
    teller, mirror = Teller(pools), Mirror(held)
    waiting = 20
    steps = 0
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
        steps += 1
        mirrored = mirror.schedule(send(teller.step(steps, schedule, ahead=False)))
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
    mirror.schedule(teller.step(steps + 1, [], ahead=False))
    # Nothing is kept of requests that are gone.
    assert not mirror._requests
    assert not any(pool._owned for pool in held.values())


def test_tokens_that_rank_0_has_not_read_are_left_out() -> None:
    pools = {kind: PagePool(PAGES) for kind in LayerKind}
    for pool in pools.values():
        pool.grow("a", 2)
    teller, mirror = Teller(pools), Mirror({kind: HeldPages(PAGES) for kind in LayerKind})
    request = Request("a", [1, 2, 3], SamplingParams(4))
    mirror.schedule(send(teller.step(1, [Work(request, 0, 3)], ahead=False)))
    work = Work(request, 3, 1, ahead=True)
    (other,) = mirror.schedule(send(teller.step(2, [work], ahead=True)))
    same(work, other)


KEPT = (Held(0, 0, (1,)),) * len(LayerKind)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Row(0, 0, 2, (1,), (), 1, False, KEPT), "has 1 tokens for 2 places"),
        (Row(0, 0, 1, (1,), (), 3, False, KEPT), "wants 3 rows of logits, and here 1"),
        (Row(0, 0, 1, (1,), (), 1, False, (Held(0, 0, (PAGES,)),) * 2), f"is given page {PAGES} of {PAGES}"),
        (Row(0, 0, 1, (1,), (), 1, False, (Held(0, 2, ()),) * 2), "is said to keep 2 pages and has 0"),
    ],
)
def test_what_contradicts_itself_is_refused(row: Row, said: str) -> None:
    mirror = Mirror({kind: HeldPages(PAGES) for kind in LayerKind})
    with pytest.raises(BadMessage, match=said):
        mirror.schedule(send(Step(1, (row,))))
