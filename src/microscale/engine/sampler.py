"""From logits to the next tokens and their log-probabilities, for all requests of a step at once.

Owns what a request asks of sampling (``SamplingParams``) and what must be remembered of it between steps: its seed, how
many tokens it has drawn, and, with penalties, which tokens it has seen. The arithmetic is the op ``sampling``.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from microscale.backends.ops import (
    MAX_TOP_LOGPROBS,
    PROMPT_BIT,
    Bias,
    History,
    Logits,
    Sampled,
    Sampling,
    SamplingBatch,
    Status,
)
from microscale.errors import BadLogits, BadRequest

MAX_BIAS = 1024
"""Tokens of one request that may have a bias; the stop tokens that ``min_tokens`` holds back count too."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen, and when to stop. Names and meanings are those of OpenAI and vLLM."""

    max_tokens: int = 16
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
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    """End the output like an end token; ``ignore_eos`` does not touch them."""
    min_tokens: int = 0
    """Until so many are there, no end or stop token is chosen."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside the chosen one."""
    prompt_logprobs: int | None = None
    """The same for the prompt's own tokens."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise BadRequest(f"max_tokens is {self.max_tokens}; at least one token must be asked for.")
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

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
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


@dataclass(frozen=True)
class Choice:
    """The next token of one request, or why there is none."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    status: Status = Status.OK

    def check(self) -> None:
        """Raise what the request must be told."""
        if self.status is Status.NON_FINITE:
            raise BadLogits("The model's logits are not finite; the weights or the activations are broken.")
        if self.status is Status.NOTHING_ALLOWED:
            raise BadRequest("logit_bias and the grammar together allow no token here.")


@dataclass
class _Request:
    params: SamplingParams
    seed: int
    stops: frozenset[int]
    slot: int
    """Row of the token counts; 0 belongs to all requests without penalties."""
    drawn: int = 0

    def bias(self) -> dict[int, float]:
        pairs = dict(self.params.logit_bias)
        if self.drawn < self.params.min_tokens:
            pairs |= dict.fromkeys(self.stops, -math.inf)
        return pairs


class Sampler:
    """The requests of an engine. ``add`` one, ``sample`` those of a step, ``remove`` it when it is done."""

    def __init__(self, sampling: Sampling, vocab: int, device: torch.device, eos_token_ids: Sequence[int] = ()) -> None:
        self._sampling = sampling
        self._vocab = vocab
        self._device = device
        self._eos = tuple(eos_token_ids)
        self._requests: dict[int, _Request] = {}
        self._next_id = 0
        # int32 [slots, vocab], 0.8 MB a slot for gpt-oss: made when the first request with penalties comes.
        self._counts: Tensor | None = None
        self._free_slots: list[int] = []

    def add(self, params: SamplingParams, prompt: Sequence[int] = ()) -> int:
        """A new request; gives the number by which it is known here."""
        params.check_vocab(self._vocab)
        slot = self._take_slot(prompt) if params.penalised else 0
        seed = secrets.randbits(63) if params.seed is None else params.seed
        self._requests[self._next_id] = _Request(params, seed, params.stop_tokens(self._eos), slot)
        self._next_id += 1
        return self._next_id - 1

    def remove(self, request_id: int) -> None:
        slot = self._requests.pop(request_id).slot
        if slot:
            self._free_slots.append(slot)

    def sample(
        self, logits: Tensor, request_ids: Sequence[int], blocks: Logits | None = None, allowed: Tensor | None = None
    ) -> list[Choice]:
        """The next token of each request from its row of ``logits`` (float32 [rows, vocab]).

        ``allowed`` (int32 [rows, ceil(vocab / 32)]) is the hook for grammars: bit t % 32 of word t // 32 admits t.
        """
        requests = [self._requests[request_id] for request_id in request_ids]
        sampled = self._sampling(logits, self._batch(requests, allowed), blocks)
        for request in requests:
            request.drawn += 1
        return _choices(sampled, [request.params.logprobs or 0 for request in requests])

    def prompt_logprobs(self, logits: Tensor, tokens: Sequence[int], top: int = 0) -> list[Choice]:
        """How likely given tokens were: row i of ``logits`` belongs to the place that ``tokens[i]`` took."""
        ids = torch.tensor(tokens, dtype=torch.int32).to(self._device)
        return _choices(self._sampling.score(logits, ids, top), [top] * len(tokens))

    def _batch(self, requests: Sequence[_Request], allowed: Tensor | None) -> SamplingBatch:
        all_params = [request.params for request in requests]
        floats = [
            (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
            for p in all_params
        ]
        # Two copies to the device, whatever the number of requests.
        numbers = torch.tensor(floats, dtype=torch.float32).view(-1, 6).T.contiguous().to(self._device)
        whole = torch.tensor([(r.seed, r.drawn, r.params.top_k, r.slot) for r in requests], dtype=torch.int64)
        wide = whole.view(-1, 4).T.contiguous().to(self._device)
        temperature, top_p, min_p, repetition, presence, frequency = numbers
        history = None
        if self._counts is not None and any(p.penalised for p in all_params):
            history = History(wide[3].int(), self._counts)
        return SamplingBatch(
            temperature, wide[2].int(), top_p, min_p, repetition, presence, frequency, wide[0], wide[1],
            draws=any(p.temperature > 0 for p in all_params),
            filters=any(p.filtered for p in all_params),
            history=history,
            bias=self._bias([request.bias() for request in requests]),
            allowed=allowed,
            top_logprobs=max((p.logprobs or 0 for p in all_params), default=0),
        )  # fmt: skip

    def _bias(self, pairs: Sequence[Mapping[int, float]]) -> Bias | None:
        capacity = max((len(items) for items in pairs), default=0)
        if not capacity:
            return None
        capacity = -(-capacity // 16) * 16
        tokens = torch.full((len(pairs), capacity), -1, dtype=torch.int32)
        values = torch.zeros(len(pairs), capacity)
        for row, items in enumerate(pairs):
            tokens[row, : len(items)] = torch.tensor(list(items), dtype=torch.int32)
            values[row, : len(items)] = torch.tensor(list(items.values()))
        return Bias(tokens.to(self._device), values.to(self._device))

    def _take_slot(self, prompt: Sequence[int]) -> int:
        if not self._free_slots:
            held = 1 if self._counts is None else len(self._counts)
            grown = torch.zeros(2 * held + 6, self._vocab, dtype=torch.int32, device=self._device)
            if self._counts is not None:
                grown[:held] = self._counts
            self._counts = grown
            self._free_slots = list(range(held, len(grown)))
        slot = self._free_slots.pop()
        assert self._counts is not None
        row = self._counts[slot].zero_()
        row[torch.tensor(list(prompt), dtype=torch.int64, device=self._device)] = PROMPT_BIT
        return slot


def _choices(sampled: Sampled, wanted: Sequence[int]) -> list[Choice]:
    """To the host: the one place where sampling waits for the device."""
    tokens, logprobs, status = sampled.tokens.tolist(), sampled.logprobs.tolist(), sampled.status.tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if sampled.top is not None:
        rows = zip(sampled.top.tokens.tolist(), sampled.top.logprobs.tolist(), wanted, strict=True)
        tops = [tuple(zip(ids[:count], values[:count], strict=True)) for ids, values, count in rows]
    return [Choice(*row[:3], Status(row[3])) for row in zip(tokens, logprobs, tops, status, strict=True)]
