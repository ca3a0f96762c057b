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
    """The ids of the control tokens, and their tokenizer."""

    tokenizer: Tokenizer
    start: int
    channel: int
    constrain: int
    message: int
    end: int
    call: int
    return_: int
    stops: frozenset[int]
    """Tokens that end the model's turn, and with it generation."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> HarmonyTokens:
        """Look them up. Raises ``BadCheckpoint`` if the tokenizer lacks one."""
        tokenizer.protect(NAMES)
        ids = tokenizer.control
        stops = {ids[name] for name in (CALL, RETURN, END_OF_TEXT) if name in ids}
        return cls(
            tokenizer=tokenizer,
            start=ids[START],
            channel=ids[CHANNEL],
            constrain=ids[CONSTRAIN],
            message=ids[MESSAGE],
            end=ids[END],
            call=ids[CALL],
            return_=ids[RETURN],
            stops=frozenset(stops),
        )
