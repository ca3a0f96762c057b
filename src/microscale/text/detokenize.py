"""Tokens to text, one at a time, without ever returning half a character.

The unit is the code point: if its bytes are spread over tokens, it is held back until it is complete. Bytes become
U+FFFD only when no further byte can complete them. A combining mark may arrive in a separate delta: holding back every
letter until the next token would delay all text by one token, and the concatenation is the same.
"""

from __future__ import annotations

import codecs

from microscale.text.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one stream of tokens. All deltas joined equal all bytes joined and decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = _Utf8("replace")

    def feed(self, token: int) -> str:
        """The characters that this token completes; a control token has none."""
        return self._utf8.decode(self._token_bytes(token))

    def whole(self, token: int) -> str:
        """The text of a token of whole characters, if none is pending; else empty. Changes nothing."""
        if self._utf8.getstate()[0]:
            return ""
        try:
            return self._token_bytes(token).decode()
        except UnicodeDecodeError:
            return ""

    def flush(self) -> str:
        """The rest, when no token follows: U+FFFD for an incomplete character."""
        text = self._utf8.decode(b"", True)
        self._utf8.reset()
        return text
