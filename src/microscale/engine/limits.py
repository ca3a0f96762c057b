"""Limits of a step and of the queue."""

from __future__ import annotations

from dataclasses import dataclass

from microscale.errors import BadSetting

SCORED_TOKENS = 64
"""The most prompt tokens of one step whose log-probabilities are computed, over all requests. Each has a row of logits,
1.2 MB for gpt-oss, which is reduced to a few numbers before the next step."""
SHORT_CONTEXT = 2048
"""Tokens per sequence that a narrow page table holds."""
LEAST_SEQUENCES = 64
"""``--max-num-seqs`` by default, on cards without room for more."""
DRAFTED_SEQUENCES = 16
"""A model with states drafts only while at most this many sequences decode: the state after each draft takes a
slot, and drafts gain little with more sequences."""
PROMPT_GRAPH_TOKENS = 2048
"""Larger steps take the GPU longer than the host needs to launch their kernels one by one. An H200 computes 2048 tokens
of gpt-oss-20b in 22 to 26 ms, and a host needs 26 to 31 for their launches (docs/lab/start.md)."""


@dataclass(frozen=True)
class Limits:
    """Limits of a step and of the queue."""

    page_size: int
    window: int
    """Positions that a sliding layer sees."""
    max_num_seqs: int = LEAST_SEQUENCES
    max_num_batched_tokens: int = 2048
    max_model_len: int = 131072
    max_queue: int = 1024
    prefix_caching: bool = True
    key_lookahead: int = 0
    """Tokens after a page that its prefix-cache key covers. It is 1 with a draft head whose rows depend on the token
    after them: then a request that reuses a page continues with the token that its last row was computed with."""

    def __post_init__(self) -> None:
        for name in ("page_size", "window", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_queue"):
            if getattr(self, name) < 1:
                raise BadSetting(f"{name} is {getattr(self, name)}; it is at least 1.")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise BadSetting(
                f"max_num_seqs {self.max_num_seqs} is more than max_num_batched_tokens {self.max_num_batched_tokens}; "
                f"each sequence that decodes takes one token of a step."
            )


def drafted_sequences(sequences: int, *, states: bool) -> int:
    """How many of these sequences may have drafts in one step. ``states``: the model has layers of states."""
    return min(sequences, DRAFTED_SEQUENCES) if states else sequences
