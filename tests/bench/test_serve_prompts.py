"""Prompts of ``bench serve``: exact lengths, by any tokenizer, and nothing in common."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from microscale.bench.serve_client import BenchFailed
from microscale.bench.serve_load import Prompts
from microscale.models.embedded import FOLDER
from microscale.text.byte_tokenizer import byte_tokenizer
from microscale.text.tokenizer import Tokenizer
from support.tiny_tokenizers import tiny

LENS = (1, 2, 16, 17, 64, 128, 255, 512, 1024)
PAGE = 16


@pytest.mark.parametrize("make", [byte_tokenizer, tiny, lambda: Tokenizer.load(FOLDER)], ids=["bytes", "tiny", "demo"])
def test_lengths_are_exact_and_beginnings_differ(make: Callable[[], Tokenizer]) -> None:
    encode = make().encode
    asked = []

    def count(text: str) -> int:
        asked.append(text)
        return len(encode(text))

    prompts = Prompts(count)
    made = [(length, prompts.make(length)) for length in LENS * 5]
    assert [len(encode(text)) for _, text in made] == [length for length, _ in made]
    assert len(asked) < 10 * len(made)
    pages = [tuple(encode(text)[:PAGE]) for length, text in made if length >= PAGE]
    assert len(set(pages)) == len(pages)


def test_texts_follow_from_the_seed() -> None:
    def made(seed: int) -> list[str]:
        prompts = Prompts(len, seed)
        return [prompts.make(length) for length in (16, 100)]

    assert made(1) == made(1)
    assert made(1)[0] != made(2)[0]


def test_a_length_that_no_text_has_is_an_error() -> None:
    with pytest.raises(BenchFailed, match="exactly 7 tokens"):
        Prompts(lambda text: 2 * len(text)).make(7)
