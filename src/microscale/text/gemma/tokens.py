"""Gemma 4's control tokens, looked up by name in the checkpoint's tokenizer: every checkpoint has its own ids."""

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
"""Surrounds every text in a call, a result or a tool's declaration, so that nothing in it needs an escape."""

NAMES = (TURN, END_TURN, CHANNEL, END_CHANNEL, CALL, END_CALL, RESPONSE, QUOTE)


@dataclass(frozen=True)
class GemmaTokens:
    """The ids of the control tokens, in the order of ``NAMES``, and their tokenizer."""

    tokenizer: Tokenizer
    stops: frozenset[int]
    """Tokens that end the model's turn or wait for a tool's result: generation ends there."""
    turn: int
    end_turn: int
    channel: int
    end_channel: int
    call: int
    end_call: int
    response: int
    quote: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> GemmaTokens:
        """Look them up. Raises ``BadCheckpoint`` if the tokenizer lacks one."""
        tokenizer.protect(NAMES)
        ids = tokenizer.control
        stops = frozenset(ids[name] for name in (END_TURN, RESPONSE, EOS) if name in ids)
        return cls(tokenizer, stops, *(ids[name] for name in NAMES))
