"""The page pool: pages are free, in use or kept, and found again by their keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microscale.engine.pages import NOWHERE, PagePool
from microscale.errors import OutOfPages


def test_growing_is_all_or_nothing() -> None:
    pool = PagePool(4)
    pool.grow("a", 3)
    before = list(pool.pages_of("a"))
    with pytest.raises(OutOfPages, match="2 more KV pages are needed and 1 of 4 are free"):
        pool.grow("b", 2)
    assert pool.pages_of("a") == before
    assert not pool.pages_of("b")
    assert pool.num_free == 1
    pool.check()


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 6), st.booleans()), max_size=60))
def test_no_page_is_lost_or_shared(actions: list[tuple[str, int, bool]]) -> None:
    pool = PagePool(12)
    for owner, size, release in actions:
        held = list(pool.pages_of(owner))
        if release:
            pool.release(owner)
            assert not pool.pages_of(owner)
        else:
            try:
                pool.grow(owner, size)
            except OutOfPages:
                assert pool.num_free < size - len(held)
            assert list(pool.pages_of(owner))[: len(held)] == held
        pool.check()


def test_check_sees_a_page_that_is_held_twice() -> None:
    pool = PagePool(2)
    pool.grow("a", 1)
    pool._owned["a"].append(pool._owned["a"][0])
    with pytest.raises(AssertionError, match="a holds a page twice"):
        pool.check()


def test_a_published_page_is_shared_and_kept() -> None:
    pool = PagePool(3)
    pool.grow("a", 2)
    first = pool.pages_of("a")[0]
    pool.publish("a", 0, b"key")
    assert pool.find(b"key")
    pool.share("b", [b"key"])
    assert list(pool.pages_of("b")) == [first]
    pool.release("a")
    pool.check()
    assert pool.num_free == 2  # the other page of a, and one that never was handed out
    pool.release("b")
    assert pool.num_free == 3
    pool.grow("c", 3)  # takes the kept page last
    assert not pool.find(b"key")
    assert pool.num_evicted == 1
    pool.check()


def test_two_pages_with_the_same_content_are_found_once() -> None:
    pool = PagePool(2)
    for owner in "ab":
        pool.grow(owner, 1)
        pool.publish(owner, 0, b"same")
    pool.release("b")  # its page has no key of its own, so it is free at once
    assert pool.num_free == 1
    pool.check()


def test_pages_that_were_found_again_outlive_those_that_were_not() -> None:
    pool = PagePool(3)
    for index, owner in enumerate("abc"):
        pool.grow(owner, 1)
        pool.publish(owner, 0, bytes([index]))
        pool.release(owner)
    pool.share("again", [bytes([0])])
    pool.release("again")
    pool.grow("new", 2)
    assert pool.find(bytes([0]))
    assert not pool.find(bytes([1]))


def test_of_a_chain_the_tail_goes_first() -> None:
    pool = PagePool(3)
    pool.grow("a", 3)
    for index in range(3):
        pool.publish("a", index, bytes([index]))
    pool.release("a")
    pool.grow("b", 1)
    assert [pool.find(bytes([index])) for index in range(3)] == [True, True, False]


def test_dropped_pages_leave_their_places() -> None:
    pool = PagePool(4)
    pool.grow("a", 3)
    pool.drop("a", 2)
    assert list(pool.pages_of("a"))[:2] == [NOWHERE, NOWHERE]
    assert pool.num_free == 3
    pool.drop("a", 2)
    pool.grow("a", 5)
    assert len(pool.pages_of("a")) == 5
    pool.check()
    pool.release("a")
    assert pool.num_free == 4
