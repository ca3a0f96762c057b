"""ChatML's control tokens, looked up by name in the checkpoint's tokenizer: every checkpoint has its own ids.

In checkpoints, the marks of reasoning, calls and results are added tokens that are not ``special``. Here they are
control tokens like the others: text that spells one remains text.
"""

from __future__ import annotations

from dataclasses import dataclass

from microscale.text.tokenizer import Tokenizer

START = "<|im_start|>"
END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
THINK = "<think>"
END_THINK = "</think>"
CALL = "<tool_call>"
END_CALL = "</tool_call>"
RESULT = "<tool_response>"
END_RESULT = "</tool_response>"

NAMES = (START, END, THINK, END_THINK, CALL, END_CALL, RESULT, END_RESULT)


@dataclass(frozen=True)
class ChatmlTokens:
    """The ids of the control tokens, in the order of ``NAMES``, and their tokenizer."""

    tokenizer: Tokenizer
    stops: frozenset[int]
    """Tokens that end the model's turn, and with it generation."""
    start: int
    end: int
    think: int
    end_think: int
    call: int
    end_call: int
    result: int
    end_result: int

    @property
    def inner(self) -> dict[int, str]:
        """Marks that are words in the strings of a call's arguments."""
        return {self.think: THINK, self.end_think: END_THINK, self.result: RESULT, self.end_result: END_RESULT}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatmlTokens:
        """Look them up. Raises ``BadCheckpoint`` if the tokenizer lacks one."""
        tokenizer.protect(NAMES)
        ids = tokenizer.control
        stops = frozenset(ids[name] for name in (END, END_OF_TEXT) if name in ids)
        return cls(tokenizer, stops, *(ids[name] for name in NAMES))
