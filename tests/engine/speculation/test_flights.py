"""A step with drafts is read with the next call: what may happen in between."""

from __future__ import annotations

import pytest

from microscale.engine.limits import Limits
from microscale.engine.speculation.speculation import Speculation
from support.drafters import KnowingDrafter
from support.mock_engine import VOCAB, System, alone

LIMITS = Limits(page_size=4, window=6, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=256)


def system_with(luck: float) -> System:
    drafter = KnowingDrafter(lambda tokens, count: alone(tokens, count, LIMITS.window), VOCAB, luck)
    return System(LIMITS, 80, 60, speculation=Speculation(drafter, 5))


def in_the_air(system: System) -> bool:
    pending = system.engine._pending
    return pending is not None and pending.drafted


def step_until_in_the_air(system: System) -> None:
    while not in_the_air(system):
        system.step()


@pytest.mark.parametrize("luck", [0.0, 0.5, 1.0])
def test_who_leaves_meanwhile_has_no_more_outputs_and_no_pages(luck: float) -> None:
    system = system_with(luck)
    for name in ("a", "b"):
        system.submit(name, [ord(name) % 7, 2, 3], 20)
    step_until_in_the_air(system)
    told = len(system.outputs["a"])
    assert system.engine.abort("a")
    system.engine.check()
    # Somebody else comes under the same name, with another prompt.
    system.submit("a", [9, 9, 1, 4], 15)
    system.run()
    assert told
    assert system.tokens("a") == alone([9, 9, 1, 4], 15, LIMITS.window)
    assert system.tokens("b") == alone([ord("b") % 7, 2, 3], 20, LIMITS.window)
    assert all(pool.num_free == pool.num_pages for pool in system.scheduler.pools.values())


def test_a_prompt_beside_drafts_goes_on_when_who_has_them_leaves() -> None:
    """It runs in the same step, and what it computed counts."""
    system = system_with(1.0)
    system.submit("short", [1, 2, 3], 40)
    step_until_in_the_air(system)
    prompt = [at % VOCAB for at in range(8)]
    system.submit("long", prompt, 6)
    system.step()
    assert in_the_air(system)
    assert {work.request.request_id for work in system.engine._pending.schedule} == {"short", "long"}  # type: ignore[union-attr]
    system.engine.abort("short")
    system.engine.check()
    system.run()
    assert system.tokens("long") == alone(prompt, 6, LIMITS.window)


def test_an_engine_that_lost_all_its_requests_serves_the_next() -> None:
    system = system_with(1.0)
    system.submit("a", [1, 2, 3], 20)
    step_until_in_the_air(system)
    system.engine.abort("a")
    assert not system.engine.has_work
    system.engine.check()
    system.submit("b", [4, 5], 8)
    system.run()
    assert system.tokens("b") == alone([4, 5], 8, LIMITS.window)
    assert not system.outputs["a"][1:]
