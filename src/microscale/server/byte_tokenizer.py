"""A byte tokenizer for random weights, which come without one: 256 bytes, then the chat format's control tokens."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from microscale.text.formats import DEFAULT
from microscale.text.tokenizer import BYTE_OF, Tokenizer

SOURCE = "the byte tokenizer for random weights"


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token, so any text has its tokens, and any vocabulary of 264 or more has room."""
    inner = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_OF), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in DEFAULT.CONTROL])
    return Tokenizer(inner, SOURCE)
