"""Prompts of random text whose length in tokens is exact, by the tokenizer that will count them."""

from __future__ import annotations

import random
from collections.abc import Callable

from microscale.bench.serve_client import BenchFailed

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ROUNDS = 200


class Prompts:
    """Texts that differ from their first letters on, so that no prefix cache has any of them.

    ``count`` gives the tokens of a text; the texts follow from ``seed``.
    """

    def __init__(self, count: Callable[[str], int], seed: int = 0) -> None:
        self._count = count
        self._chooser = random.Random(seed)
        self._letters_per_token = 1.0
        """As seen so far: texts of the right size are then near the first time."""

    def make(self, num_tokens: int) -> str:
        text = self._text(round(num_tokens * self._letters_per_token))
        for _ in range(ROUNDS):
            found = self._count(text)
            if found == num_tokens:
                return text
            self._letters_per_token = max(len(text), 1) / max(found, 1)
            text = self._nearer(text, num_tokens - found)
        raise BenchFailed(f"No text of exactly {num_tokens} tokens was found: the tokenizer makes {found} of the last.")

    def _nearer(self, text: str, missing: int) -> str:
        """A text that is longer or shorter by about so many tokens.

        The last steps up are letters that are words of their own, since letters that are added to a word may join its
        token and change nothing.
        """
        if missing < 0:
            return text[: min(-1, round(missing * self._letters_per_token))]
        if missing <= 2:
            return text + " " + self._chooser.choice(LETTERS)
        return text + self._text(round((missing - 1) * self._letters_per_token))

    def _text(self, length: int) -> str:
        text = ""
        while len(text) < length:
            text += "".join(self._chooser.choices(LETTERS, k=self._chooser.randint(2, 9))) + " "
        return text[:length]
