"""Harmony's control tokens, found in the checkpoint's tokenizer by name: their ids are the checkpoint's own affair."""

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
    """The ids of the control tokens, and the tokenizer that they belong to."""

    tokenizer: Tokenizer
    start: int
    channel: int
    constrain: int
    message: int
    end: int
    call: int
    return_: int
    stops: frozenset[int]
    """Tokens after which the model's turn is over: generation ends there."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> HarmonyTokens:
        """Look them up; a name that the tokenizer lacks is a ``BadCheckpoint``."""
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
