"""A tokenizer of bytes for random weights, which come without one: 256 bytes, then Harmony's control tokens."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from microscale.text import harmony_tokens as names
from microscale.text.tokenizer import BYTE_OF, Tokenizer

SOURCE = "the byte tokenizer for random weights"


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token, so any text has its tokens, and any vocabulary of 264 or more has room."""
    inner = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_OF), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    controls = [*names.NAMES, names.END_OF_TEXT]
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in controls])
    return Tokenizer(inner, SOURCE)
