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
    """The ids of the control tokens, and their tokenizer."""

    tokenizer: Tokenizer
    start: int
    end: int
    think: int
    end_think: int
    call: int
    end_call: int
    stops: frozenset[int]
    """Tokens that end the model's turn, and with it generation."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatmlTokens:
        """Look them up. Raises ``BadCheckpoint`` if the tokenizer lacks one."""
        tokenizer.protect(NAMES)
        ids = tokenizer.control
        stops = {ids[name] for name in (END, END_OF_TEXT) if name in ids}
        return cls(
            tokenizer=tokenizer,
            start=ids[START],
            end=ids[END],
            think=ids[THINK],
            end_think=ids[END_THINK],
            call=ids[CALL],
            end_call=ids[END_CALL],
            stops=frozenset(stops),
        )
