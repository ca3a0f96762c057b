"""Stop strings: where they end a stream, and what is held back meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microscale.errors import BadRequest
from microscale.text.stop import MAX_STOP_CHARS, StopStrings

# Few letters, so that stops overlap and begin again inside themselves.
words = st.text("ab", min_size=1, max_size=5)


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    watch = StopStrings(stops)
    return [*(watch.feed(piece) for piece in pieces), watch.flush()], watch.matched


def truth(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition: the stop complete first, of those the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.lists(words, max_size=4), st.lists(st.text("ab", max_size=4), max_size=12))
def test_any_cut_gives_the_same(stops: list[str], pieces: list[str]) -> None:
    shown, found = run(stops, pieces)
    assert ("".join(shown), found) == truth(stops, "".join(pieces))


@given(st.lists(words, min_size=1, max_size=4), st.text("abc", max_size=30))
def test_no_more_is_held_than_may_begin_a_stop(stops: list[str], text: str) -> None:
    watch = StopStrings(stops)
    shown = ""
    for at, char in enumerate(text):
        shown += watch.feed(char)
        if watch.matched is not None:
            break
        so_far = text[: at + 1]
        held = max(n for stop in stops for n in range(len(stop)) if so_far.endswith(stop[:n]))
        assert shown == so_far[: len(so_far) - held]


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "found"),
    [
        (["END"], ["a E", "N", "D b"], ["a ", "", "", ""], "END"),
        (["END"], ["a E", "N", "X"], ["a ", "", "ENX", ""], None),
        (["END"], ["a EN"], ["a ", "EN"], None),
        (["b", "abc"], ["abc"], ["a", ""], "b"),
        (["bc", "abc"], ["xab", "c"], ["x", "", ""], "abc"),
        (["aab"], ["aaa", "b"], ["a", "", ""], "aab"),
        (["\n\n"], ["one\n", "two\n", "\nthree"], ["one", "\ntwo", "", ""], "\n\n"),
        ([], ["anything"], ["anything", ""], None),
    ],
)
def test_cases(stops: list[str], pieces: list[str], shown: list[str], found: str | None) -> None:
    assert run(stops, pieces) == (shown, found)


def test_nothing_follows_a_stop() -> None:
    watch = StopStrings(["x"])
    assert [watch.feed("ax"), watch.feed("b"), watch.flush()] == ["a", "", ""]


@pytest.mark.parametrize("stops", [[""], ["a", ""], ["a" * (MAX_STOP_CHARS + 1)]])
def test_limits(stops: list[str]) -> None:
    with pytest.raises(BadRequest):
        StopStrings(stops)
