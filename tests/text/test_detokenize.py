"""Tokens to text: whole characters only, and the same text however it is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from microscale.text.detokenize import Detokenizer
from support.tiny_tokenizers import tiny

token_ids = st.integers(0, 499)


def deltas(ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tiny())
    return [*(detokenizer.feed(token) for token in ids), detokenizer.flush()]


@given(st.text())
def test_no_delta_holds_half_a_character(text: str) -> None:
    parts = deltas(tiny().encode(text))
    assert "".join(parts) == text
    assert parts[-1] == ""


@given(st.lists(token_ids))
def test_any_tokens_give_the_text_of_their_bytes(ids: list[int]) -> None:
    assert "".join(deltas(ids)) == b"".join(map(tiny().token_bytes, ids)).decode("utf-8", "replace")


def test_an_emoji_comes_with_its_last_byte() -> None:
    byte = {tiny().token_bytes(n): n for n in range(500) if len(tiny().token_bytes(n)) == 1}
    smile = [byte[bytes([b])] for b in "😀".encode()]
    assert deltas(smile) == ["", "", "", "😀", ""]
    # Cut inside: one U+FFFD, and only at the end, since the last byte could still have come.
    assert deltas(smile[:3]) == ["", "", "", "�"]
    # A letter makes it certain at once. A surrogate's bytes are three errors, each certain with its byte.
    assert deltas([*smile[:3], byte[b"a"]]) == ["", "", "", "�a", ""]
    assert "".join(deltas([byte[bytes([b])] for b in b"\xed\xa0\x80"])) == "���"


def test_families_and_combining_marks_are_whole_code_points() -> None:
    text = "👩‍👩‍👧 e\u0301 🇩🇪"
    parts = deltas(tiny().encode(text))
    assert "".join(parts) == text
    assert "�" not in "".join(parts)
