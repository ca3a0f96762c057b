"""Harmony's control tokens, looked up by name in the checkpoint's tokenizer: every checkpoint has its own ids."""

from __future__ import annotations

from dataclasses import dataclass

from microscale.text.tokenizer import Tokenizer

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"
END_OF_TEXT = "<|endoftext|>"

NAMES = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)


@dataclass(frozen=True)
class HarmonyTokens:
    """The ids of the control tokens, in the order of ``NAMES``, and their tokenizer."""

    tokenizer: Tokenizer
    stops: frozenset[int]
    """Tokens that end the model's turn, and with it generation."""
    start: int
    channel: int
    constrain: int
    message: int
    end: int
    call: int
    return_: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> HarmonyTokens:
        """Look them up. Raises ``BadCheckpoint`` if the tokenizer lacks one."""
        tokenizer.protect(NAMES)
        ids = tokenizer.control
        stops = frozenset(ids[name] for name in (CALL, RETURN, END_OF_TEXT) if name in ids)
        return cls(tokenizer, stops, *(ids[name] for name in NAMES))
