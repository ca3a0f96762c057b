"""Tokens to text, one at a time, without ever handing out half a character.

The unit is the code point: one whose bytes are spread over tokens is held back until it is whole. U+FFFD stands for
bytes only when no further byte can make them a character. A combining mark may come in a delta of its own: to hold
every letter until the next token is known would delay all text by one token, and concatenation is the same.
"""

from __future__ import annotations

import codecs

from microscale.text.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one stream of tokens. The concatenation of all deltas is the decoded concatenation of all bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = _Utf8("replace")

    def feed(self, token: int) -> str:
        """The characters that this token completes; a control token has none."""
        return self._utf8.decode(self._token_bytes(token))

    def whole(self, token: int) -> str:
        """The text of a token of whole characters, where none is incomplete; else empty. Nothing changes by it."""
        if self._utf8.getstate()[0]:
            return ""
        try:
            return self._token_bytes(token).decode()
        except UnicodeDecodeError:
            return ""

    def flush(self) -> str:
        """What is certain now that no token follows: U+FFFD for a character that stayed incomplete."""
        text = self._utf8.decode(b"", True)
        self._utf8.reset()
        return text
