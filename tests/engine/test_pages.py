"""The page pool: every page has one owner, all or nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microscale.engine.pages import PagePool
from microscale.errors import OutOfPages


def test_growing_is_all_or_nothing() -> None:
    pool = PagePool(4)
    pool.grow("a", 3)
    before = list(pool.pages_of("a"))
    with pytest.raises(OutOfPages, match="2 more KV pages are needed and 1 of 4 are free"):
        pool.grow("b", 2)
    assert pool.pages_of("a") == before
    assert pool.pages_of("b") == []
    assert pool.num_free == 1
    pool.check()


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 6), st.booleans()), max_size=60))
def test_no_page_is_lost_or_shared(actions: list[tuple[str, int, bool]]) -> None:
    pool = PagePool(12)
    for owner, size, release in actions:
        held = list(pool.pages_of(owner))
        if release:
            pool.release(owner)
            assert pool.pages_of(owner) == []
        else:
            try:
                pool.grow(owner, size)
            except OutOfPages:
                assert pool.num_free < size - len(held)
            assert pool.pages_of(owner)[: len(held)] == held
        pool.check()


def test_check_sees_a_page_with_two_owners() -> None:
    pool = PagePool(2)
    pool.grow("a", 1)
    pool.pages_of("a").append(pool.pages_of("a")[0])
    with pytest.raises(AssertionError, match="inconsistent"):
        pool.check()
