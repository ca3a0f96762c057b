"""What a step and the queue may hold."""

from __future__ import annotations

from dataclasses import dataclass

from microscale.errors import BadSetting

SCORED_TOKENS = 64
"""Prompt tokens of one step whose log-probabilities are wanted, of all requests together: the scheduler gives no more.
Each has a row of logits, 1.2 MB for gpt-oss, which is turned into a few numbers before the next step."""


@dataclass(frozen=True)
class Limits:
    """What a step and the queue may hold."""

    page_size: int
    window: int
    """Positions that a sliding layer sees."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 131072
    max_queue: int = 1024
    prefix_caching: bool = True
    key_lookahead: int = 0
    """Tokens after a page that its key covers: 1 where a draft head's rows hold the token after them, so that whoever
    finds a page goes on with the token that its last row was made with."""

    def __post_init__(self) -> None:
        for name in ("page_size", "window", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_queue"):
            if getattr(self, name) < 1:
                raise BadSetting(f"{name} is {getattr(self, name)}; it is at least 1.")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise BadSetting(
                f"max_num_seqs {self.max_num_seqs} is more than max_num_batched_tokens {self.max_num_batched_tokens}; "
                f"each sequence that decodes takes one token of a step."
            )
