"""How a request wants its next tokens chosen, and when it stops. Goes over the socket as it is; refuses bad values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated

from msgspec import Meta, Struct

from microscale.errors import BadRequest
from microscale.planning import MAX_TOP_LOGPROBS

MAX_BIAS = 1024
"""Maximum number of tokens of a request with a bias; the stop tokens that ``min_tokens`` holds back count too."""
MAX_GRAMMAR = 2**20  # characters


class SamplingParams(Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """How the next token is chosen, and when to stop. Names and meanings are those of OpenAI and vLLM."""

    max_tokens: int = 16
    """0 only with ``prompt_logprobs``: the request then ends with its prompt."""
    temperature: float = 0.0
    """0 is greedy: the largest logit, the lowest id among equals."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else is in the batch. Without one it is random."""
    ignore_eos: bool = False
    top_k: int = 0
    """Only the k likeliest; 0 and -1 are off."""
    top_p: float = 1.0
    """Of those the fewest that hold p of the probability."""
    min_p: float = 0.0
    """Of those the ones with at least this fraction of the largest probability."""
    repetition_penalty: float = 1.0
    """Divides (if positive, else multiplies) the logits of tokens of the prompt and the output."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens of the output."""
    frequency_penalty: float = 0.0
    """Taken from the logits of tokens of the output, as often as they occur there."""
    logit_bias: Mapping[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    """End the output like an end token; ``ignore_eos`` does not touch them."""
    min_tokens: int = 0
    """No end or stop token is chosen before this many tokens."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report with the chosen one."""
    prompt_logprobs: int | None = None
    """The same for the prompt's own tokens, all but the first. Its prompt is then not taken from the prefix cache."""
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR)] | None = None
    """What the output must follow from its first token to the one that ends it, as ``grammar.Grammars`` reads it."""

    def __post_init__(self) -> None:
        if self.max_tokens < (0 if self.prompt_logprobs is not None else 1):
            raise BadRequest(
                f"max_tokens is {self.max_tokens}; at least one token must be asked for, or none and prompt_logprobs."
            )
        if not 0.0 <= self.temperature <= 100.0:
            raise BadRequest(f"temperature is {self.temperature}; it lies between 0 (greedy) and 100.")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise BadRequest(f"seed is {self.seed}; it lies between 0 and 2**63 - 1.")
        if not -1 <= self.top_k < 2**31:
            raise BadRequest(f"top_k is {self.top_k}; it is 0 or -1 (off) or at least 1.")
        if not 0.0 < self.top_p <= 1.0:
            raise BadRequest(f"top_p is {self.top_p}; it lies above 0 and goes up to 1 (off).")
        if not 0.0 <= self.min_p <= 1.0:
            raise BadRequest(f"min_p is {self.min_p}; it lies between 0 (off) and 1.")
        if not 0.01 <= self.repetition_penalty <= 100.0:
            raise BadRequest(
                f"repetition_penalty is {self.repetition_penalty}; it lies between 0.01 and 100, 1 is off."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise BadRequest(f"{name} is {getattr(self, name)}; it lies between -2 and 2, 0 is off.")
        for token, value in self.logit_bias.items():
            if not -100.0 <= value <= 100.0:
                raise BadRequest(f"logit_bias of token {token} is {value}; it lies between -100 and 100.")
        if len(self.logit_bias) + len(self.stop_token_ids) > MAX_BIAS:
            count = len(self.logit_bias) + len(self.stop_token_ids)
            raise BadRequest(f"logit_bias and stop_token_ids hold {count} tokens; at most {MAX_BIAS} can be given.")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise BadRequest(f"min_tokens is {self.min_tokens}; it lies between 0 and max_tokens, {self.max_tokens}.")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) <= MAX_TOP_LOGPROBS:
                raise BadRequest(f"{name} is {getattr(self, name)}; it lies between 0 and {MAX_TOP_LOGPROBS}.")

    @cached_property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @cached_property
    def filtered(self) -> bool:
        """Something is cut by rank: the largest part of sampling's work."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)

    def check_vocab(self, vocab: int) -> None:
        """Refuse token ids that the model does not have."""
        for name, tokens in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in tokens:
                if not 0 <= token < vocab:
                    raise BadRequest(f"{name} names token {token}, which is not in the vocabulary of {vocab}.")

    def stop_tokens(self, eos_token_ids: Sequence[int]) -> frozenset[int]:
        """The tokens that end the output."""
        return frozenset(self.stop_token_ids if self.ignore_eos else (*self.stop_token_ids, *eos_token_ids))
