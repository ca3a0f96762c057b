"""Routing by shared prefix: chains, the choice, the table's bound. Pure, so nothing of Ray is needed."""

from __future__ import annotations

import json
import random
import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microscale.errors import BadSetting
from microscale.integrations.prefix_routing import (
    BOUNDS,
    KIB,
    MOST_COUNT,
    POPULAR,
    PrefixPolicy,
    chain_length,
    chain_of,
)
from microscale.integrations.ray_serve_request import prompt_text


def encoded(**request: Any) -> bytes:
    return json.dumps(request).encode()


def test_bounds_grow_by_half_at_most() -> None:
    assert BOUNDS[:8] == (1, 2, 3, 4, 6, 8, 12, 16)
    assert BOUNDS[-1] == 1024
    assert list(BOUNDS) == sorted(set(BOUNDS))
    assert all(after <= 1.5 * before for before, after in pairwise(BOUNDS[1:]))


@given(st.integers(0, 70_000), st.integers(0, 70_000), st.integers(0, 2**32))
def test_chains_agree_as_far_as_prompts_do(shared: int, more: int, seed: int) -> None:
    text = random.Random(seed).randbytes(shared)
    one, other = chain_of(text + b"x" * more), chain_of(text + b"y" * more)
    common = chain_length(shared)
    assert one[:common] == other[:common]
    assert not set(one[common:]) & set(other[common:])
    assert len(one) == chain_length(shared + more)


def test_a_chain_stands_for_all_that_is_before() -> None:
    one, other = chain_of(b"a" * KIB + b"c" * KIB), chain_of(b"b" * KIB + b"c" * KIB)
    assert not set(one) & set(other)
    assert chain_of(b"a" * (KIB - 1)) == ()
    assert len(chain_of(bytes(3 * KIB * KIB))) == len(BOUNDS)


def test_a_conversation_that_goes_on_begins_as_before() -> None:
    said = [{"role": "user", "content": "Hello " * 400}]
    then = [*said, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "More"}]
    for name in ("messages", "input"):
        before, after = (prompt_text(encoded(**{name: messages, "stream": True})) for messages in (said, then))
        assert after.startswith(before)
        assert len(before) > 2 * KIB
    # What the model is told first comes first, wherever it stands in the request.
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert prompt_text(encoded(messages=said, tools=tools)) == prompt_text(encoded(tools=tools, messages=said))
    assert not prompt_text(encoded(tools=tools, messages=said)).startswith(prompt_text(encoded(messages=said)))
    # Sampling does not change the prompt.
    assert prompt_text(encoded(prompt="a", temperature=1)) == prompt_text(encoded(prompt="a", seed=3)) == b"a"
    ids = list(range(1000))
    assert prompt_text(encoded(prompt=[*ids, 5])).startswith(prompt_text(encoded(prompt=ids)))


@pytest.mark.parametrize("body", [b"", b"no json", b"[1]", b'{"prompt": 5}', b'{"messages": {}}', b"\xff"])
def test_other_bodies_have_no_text(body: bytes) -> None:
    assert prompt_text(body) == b""


def test_a_request_follows_its_prefix_until_that_replica_is_busy() -> None:
    policy = PrefixPolicy(kib_per_request=4.0)
    chain = chain_of(b"a" * 16 * KIB)
    policy.routed(chain, 1)
    assert policy.order(chain, {0: 0, 1: 0, 2: 0})[0] == 1
    # 16 KiB are worth four open requests.
    assert policy.order(chain, {0: 0, 1: 3, 2: 0})[0] == 1
    assert policy.order(chain, {0: 0, 1: 5, 2: 1})[0] == 0
    # Among holders the idler one; the longer prefix counts more than the shorter.
    policy.routed(chain[:4], 2)
    assert policy.order(chain, {0: 0, 1: 0, 2: 0})[:2] == [1, 2]
    policy.routed(chain, 2)
    assert policy.order(chain, {0: 0, 1: 1, 2: 0})[0] == 2


def joined(num_replicas: int) -> PrefixPolicy:
    policy = PrefixPolicy()
    for replica in range(num_replicas):
        policy.join(replica, 1000 + replica)
    return policy


def test_routers_that_know_nothing_of_each_other_agree_on_a_home() -> None:
    one, other = joined(8), joined(8)
    chains = [chain_of(bytes([n]) * 16 * KIB) for n in range(200)]
    idle = dict.fromkeys(range(8), 0)
    homes = [one.order(chain, idle)[0] for chain in chains]
    assert homes == [other.order(chain, idle)[0] for chain in chains] == [one.home(chain) for chain in chains]
    # All replicas are somebody's home, and none is everybody's: 25 each, give or take a third.
    assert all(10 <= homes.count(replica) <= 50 for replica in range(8))
    # A turn that goes on has the same home. What a router has seen itself counts more.
    assert [one.home(chain[:3]) for chain in chains] == homes
    away = (homes[0] + 1) % 8
    one.routed(chains[0], away)
    assert one.order(chains[0], idle)[0] == away
    # A busy home is no home: 16 KiB of which half may be there weigh as much as one request at 8 KiB each.
    assert one.order(chains[1], {**idle, homes[1]: 2})[0] != homes[1]
    # Without its home, a conversation moves; the others stay.
    other.forget(homes[2])
    moved = [other.home(chain) for chain in chains]
    assert all((now == before) == (before != homes[2]) for now, before in zip(moved, homes, strict=True))


def test_what_many_conversations_share_gives_no_home() -> None:
    policy = joined(8)
    system = chain_of(b"s" * 2 * KIB)
    chains = [(*system, n, n + 1000) for n in range(POPULAR)]
    assert len({policy.home(chain) for chain in chains}) == 1, "nobody knows yet that they share it"
    for chain in chains:
        policy.routed(chain, 0)
    assert policy.home(system) is None
    assert len({policy.home(chain) for chain in chains}) == 8
    # The count stays within its bits, and the replicas above it.
    for _ in range(MOST_COUNT):
        policy.routed(system[:1], 3)
    assert policy._held(system[:1]) == {0: 1.0, 3: 1.0}


def test_new_prompts_go_to_the_idlest_and_short_ones_by_turns() -> None:
    policy = PrefixPolicy()
    chains = [chain_of(bytes([n]) * 2 * KIB) for n in range(64)]
    assert all(policy.order(chain, {0: 2, 1: 1, 2: 2})[0] == 1 for chain in chains)
    for chain in ((), chains[0]):
        assert sorted(policy.order(chain, dict.fromkeys(range(4), 0))[0] for _ in range(8)) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert policy.order((), {}) == []
    assert policy.home(chains[0]) is None


def test_a_replica_that_ended_is_forgotten() -> None:
    policy = PrefixPolicy()
    chain = chain_of(b"a" * 8 * KIB)
    policy.routed(chain, 3)
    policy.routed(chain[:2], 4)
    policy.forget(3)
    assert len(policy) == 2
    assert policy.order(chain, {3: 0, 4: 0})[0] == 4
    policy.forget(4)
    assert len(policy) == 0


def test_the_table_is_bounded_and_forgets_the_least_recently_used() -> None:
    policy = PrefixPolicy(max_entries=100)
    rng = random.Random(1)
    kept = chain_of(b"kept" * 4 * KIB)
    for _ in range(2000):
        policy.routed(chain_of(rng.randbytes(8 * KIB)), rng.randrange(4))
        policy.routed(kept, 7)
        assert len(policy) <= 100
    assert policy.order(kept, {0: 0, 7: 0})[0] == 7
    # Of one prompt that does not fit, the beginning stays.
    policy = PrefixPolicy(max_entries=3)
    policy.routed(kept, 1)
    assert policy.order(kept[:3], {0: 0, 1: 0})[0] == 1
    for wrong in ({"max_entries": 0}, {"kib_per_request": 0.0}):
        with pytest.raises(BadSetting):
            PrefixPolicy(**wrong)


def test_a_full_table_takes_the_memory_that_is_promised() -> None:
    """40 MB for 2**18 entries: 160 bytes an entry, at eight replicas and at a thousand's wider masks 280."""
    policy = PrefixPolicy(max_entries=4096)
    for n in range(1000):
        policy.routed(range(n * 8 + 2**62, n * 8 + 2**62 + 8), n % 8)
    table = policy._table
    assert len(table) == 4096
    entries = sum(sys.getsizeof(key) + sys.getsizeof(value) for key, value in table.items())
    assert (sys.getsizeof(table) + entries) / len(table) < 240


@given(st.integers(0, 2**32))
def test_the_first_of_the_order_costs_the_least(seed: int) -> None:
    rng = random.Random(seed)
    policy, num = joined(12), 12
    chains = [tuple(rng.randrange(40) * 100 + depth for depth in range(rng.randrange(1, 9))) for _ in range(30)]
    for chain in chains:
        policy.routed(chain, rng.randrange(num))
    for chain in chains:
        loads = [rng.randrange(4) for _ in range(num)]
        held = policy._held(chain)
        costs = [8.0 * load - held.get(replica, 0.0) for replica, load in enumerate(loads)]
        assert costs[policy.order(chain, dict(enumerate(loads)))[0]] == min(costs)
