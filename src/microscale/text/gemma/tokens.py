"""Gemma 4's control tokens, found in the checkpoint's tokenizer by name: their ids are the checkpoint's own affair."""

from __future__ import annotations

from dataclasses import dataclass

from microscale.text.tokenizer import Tokenizer

BOS = "<bos>"
EOS = "<eos>"
TURN = "<|turn>"
END_TURN = "<turn|>"
CHANNEL = "<|channel>"
END_CHANNEL = "<channel|>"
CALL = "<|tool_call>"
END_CALL = "<tool_call|>"
RESPONSE = "<|tool_response>"
QUOTE = '<|"|>'
"""Around every text in a call, a result or a tool's declaration: nothing in the text needs an escape."""

NAMES = (TURN, END_TURN, CHANNEL, END_CHANNEL, CALL, END_CALL, RESPONSE, QUOTE)


@dataclass(frozen=True)
class GemmaTokens:
    """The ids of the control tokens, and the tokenizer that they belong to."""

    tokenizer: Tokenizer
    turn: int
    end_turn: int
    channel: int
    end_channel: int
    call: int
    end_call: int
    quote: int
    stops: frozenset[int]
    """Tokens after which the model's turn is over, or waits for a tool's result: generation ends there."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> GemmaTokens:
        """Look them up; a name that the tokenizer lacks is a ``BadCheckpoint``."""
        tokenizer.protect(NAMES)
        ids = tokenizer.control
        stops = {ids[name] for name in (END_TURN, RESPONSE, EOS) if name in ids}
        return cls(
            tokenizer=tokenizer,
            turn=ids[TURN],
            end_turn=ids[END_TURN],
            channel=ids[CHANNEL],
            end_channel=ids[END_CHANNEL],
            call=ids[CALL],
            end_call=ids[END_CALL],
            quote=ids[QUOTE],
            stops=frozenset(stops),
        )
