"""A tokenizer for random weights, which come without one: 256 bytes, then the chat format's control tokens, then words.

Text becomes bytes. The words are for the other direction: random weights choose any id of their vocabulary, and each
needs visible text, so that the tokens of a stream can be seen and timed.
"""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from microscale.text.formats import DEFAULT
from microscale.text.tokenizer import BYTE_OF, Tokenizer

SOURCE = "the byte tokenizer for random weights"
MAX_ID = 2**20
"""Ids from here on have no word: no model has as many, and ids that clients send must not fill the memory."""
SYLLABLES = tuple(consonant + vowel for consonant in "bdgjklmnprsvz" for vowel in "aeiou")


class ByteTokenizer(Tokenizer):
    """Every byte is a token, so any text can be encoded. Ids after the control tokens are made-up words."""

    def _spell(self, token: int) -> bytes:
        first = self._inner.get_vocab_size()
        if not first <= token < MAX_ID:
            return super()._spell(token)
        self._bytes[token] = spelt = word(token - first)
        return spelt


def word(number: int) -> bytes:
    """A distinct word for each number: a space, then its digits as syllables."""
    text = ""
    while not text or number:
        number, digit = divmod(number, len(SYLLABLES))
        text += SYLLABLES[digit]
    return f" {text}".encode()


def byte_tokenizer() -> Tokenizer:
    """Fits any vocabulary of 264 or more tokens."""
    inner = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_OF), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in DEFAULT.CONTROL])
    return ByteTokenizer(inner, SOURCE)
