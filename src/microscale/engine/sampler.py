"""From logits to the next tokens and their log-probabilities, for all requests of a step at once.

Owns what a request asks of sampling (``SamplingParams``) and what must be remembered of it between steps: its seed, how
many tokens it has drawn, with penalties which tokens it has seen, and with a grammar where it stands in that. The
arithmetic is the op ``sampling``.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from microscale.engine.grammar import Grammars, Matcher
from microscale.errors import BadLogits, BadRequest, Unsupported

MAX_BIAS = 1024
"""Tokens of one request that may have a bias; the stop tokens that ``min_tokens`` holds back count too."""


@dataclass(frozen=True)
class SamplingParams:
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
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    """End the output like an end token; ``ignore_eos`` does not touch them."""
    min_tokens: int = 0
    """Until so many are there, no end or stop token is chosen."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside the chosen one."""
    prompt_logprobs: int | None = None
    """The same for the prompt's own tokens, all but the first. Its prompt is then not taken from the prefix cache."""
    grammar: str | None = None
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
    fault: str | None = None
    """Why its grammar could not be followed."""

    def check(self) -> None:
        """Raise what the request must be told."""
        if self.fault is not None:
            raise BadRequest(self.fault)
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
    matcher: Matcher | None
    drawn: int = 0

    def bias(self) -> dict[int, float]:
        pairs = dict(self.params.logit_bias)
        if self.drawn < self.params.min_tokens:
            pairs |= dict.fromkeys(self.stops, -math.inf)
        return pairs


class _Reading:
    """What was sampled, on its way to the host. On a GPU by a stream of its own, ``side``: the next step, which does
    without what is read here, need not wait for the copies."""

    def __init__(self, sampled: Sampled, side: torch.cuda.Stream | None) -> None:
        self._there: torch.cuda.Event | None = None
        if side is None:
            self._copy(sampled)
            return
        side.wait_stream(torch.cuda.current_stream(side.device))
        with torch.cuda.stream(side):
            self._copy(sampled)
            self._there = torch.cuda.Event()
            self._there.record(side)

    def _copy(self, sampled: Sampled) -> None:
        top = () if sampled.top is None else (sampled.top.tokens, sampled.top.logprobs)
        rows = sampled.tokens.shape[0]
        if sampled.together is None:
            own = [_to_host(t) for t in (sampled.tokens, sampled.logprobs, sampled.status)]
        else:
            tokens, logprobs, status = _to_host(sampled.together)[:, :rows]
            own = [tokens, logprobs.view(torch.float32), status]
        self._tensors = own + [_to_host(t) for t in top]

    def choices(self, wanted: Sequence[int]) -> list[Choice]:
        """The one place where sampling waits for the device. ``wanted``: likeliest tokens of each row."""
        if self._there is not None:
            self._there.synchronize()
        tokens, logprobs, status, *top = (tensor.tolist() for tensor in self._tensors)
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
        if top:
            rows = zip(*top, wanted, strict=True)
            tops = [tuple(zip(ids[:count], values[:count], strict=True)) for ids, values, count in rows]
        return [Choice(*row[:3], Status(row[3])) for row in zip(tokens, logprobs, tops, status, strict=True)]


def _to_host(tensor: Tensor) -> Tensor:
    """A copy that the present stream makes: nobody else may have the memory before that."""
    if tensor.device.type == "cpu":
        return tensor
    tensor.record_stream(torch.cuda.current_stream(tensor.device))
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class Drawn:
    """Tokens that were drawn and not read yet."""

    tokens: Tensor
    """int32 on the device, in the order of the requests."""
    reading: _Reading
    requests: Sequence[_Request]
    faults: Mapping[int, str]
    """Rows whose grammar has failed."""


class Sampler:
    """The requests of an engine. ``add`` one, ``sample`` those of a step, ``remove`` it when it is done."""

    def __init__(
        self,
        sampling: Sampling,
        vocab: int,
        device: torch.device,
        eos_token_ids: Sequence[int] = (),
        grammars: Grammars | None = None,
    ) -> None:
        self.grammars = grammars
        """Without them no request may have a grammar."""
        self._sampling = sampling
        self._vocab = vocab
        self._device = device
        self._eos = tuple(eos_token_ids)
        self._requests: dict[int, _Request] = {}
        self._next_id = 0
        # int32 [slots, vocab], 0.8 MB a slot for gpt-oss: made when the first request with penalties comes.
        self._counts: Tensor | None = None
        self._free_slots: list[int] = []
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Rows → what ``_unread`` made for them.
        self._off: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        # int32 [rows, words], on the host and pinned: made when the first request with a grammar comes.
        self._masks: Tensor | None = None

    def add(self, params: SamplingParams, prompt: Sequence[int] = (), matcher: Matcher | None = None) -> int:
        """A new request; gives the number by which it is known here. ``matcher``: of its grammar, if it is made."""
        params.check_vocab(self._vocab)
        matcher = matcher or self._matcher(params.grammar)
        slot = self._take_slot(prompt) if params.penalised else 0
        seed = secrets.randbits(63) if params.seed is None else params.seed
        self._requests[self._next_id] = _Request(params, seed, params.stop_tokens(self._eos), slot, matcher)
        self._next_id += 1
        return self._next_id - 1

    def remove(self, request_id: int) -> None:
        slot = self._requests.pop(request_id).slot
        if slot:
            self._free_slots.append(slot)

    def sample(self, logits: Tensor, request_ids: Sequence[int], blocks: Logits | None = None) -> list[Choice]:
        """The next token of each request from its row of ``logits`` (float32 [rows, vocab])."""
        return self.read(self.draw(logits, request_ids, blocks))

    def draw(self, logits: Tensor, request_ids: Sequence[int], blocks: Logits | None = None) -> Drawn:
        """Queue the sampling of these rows. The tokens are on the device when its turn comes; ``read`` waits for them.

        Requests may be drawn again before they are read, but for those that ``must_read``.
        """
        requests = [self._requests[request_id] for request_id in request_ids]
        # On the host, while the device still computes the logits.
        allowed, faults = self._allowed(requests)
        sampled = self._sampling(logits, self._batch(requests, allowed), blocks)
        for request in requests:
            request.drawn += 1
        return Drawn(sampled.tokens, _Reading(sampled, self._side), requests, faults)

    def read(self, drawn: Drawn) -> list[Choice]:
        """Wait for what was drawn."""
        choices = drawn.reading.choices([request.params.logprobs or 0 for request in drawn.requests])
        for row, (request, choice) in enumerate(zip(drawn.requests, choices, strict=True)):
            if row in drawn.faults:
                choices[row] = replace(choice, fault=drawn.faults[row])
            elif request.matcher is not None and choice.status is Status.OK:
                request.matcher.accept(choice.token)
        return choices

    def must_read(self, request_id: int) -> bool:
        """What the request may draw next depends on what it drew."""
        return self._requests[request_id].matcher is not None

    def prompt_logprobs(self, logits: Tensor, tokens: Sequence[int], top: int = 0) -> list[Choice]:
        """How likely given tokens were: row i of ``logits`` belongs to the place that ``tokens[i]`` took."""
        ids = torch.tensor(tokens, dtype=torch.int32).to(self._device)
        return _Reading(self._sampling.score(logits, ids, top), self._side).choices([top] * len(tokens))

    def _matcher(self, grammar: str | None) -> Matcher | None:
        if grammar is None:
            return None
        if self.grammars is None:
            raise Unsupported("This engine knows no vocabulary, so it can follow no grammar.")
        return self.grammars.matcher(grammar)

    def _allowed(self, requests: Sequence[_Request]) -> tuple[Tensor | None, Mapping[int, str]]:
        """int32 [rows, ceil(vocab / 32)]: bit t % 32 of word t // 32 admits t; and rows whose grammar has failed."""
        bound = [(row, request.matcher) for row, request in enumerate(requests) if request.matcher is not None]
        if not bound or self.grammars is None:
            return None, {}
        if self._masks is None or len(self._masks) < len(requests):
            shape = (max(64, len(requests)), -(-self._vocab // 32))
            self._masks = torch.empty(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        masks = self._masks[: len(requests)]
        free = [row for row, request in enumerate(requests) if request.matcher is None]
        if free:
            masks[free] = -1
        faults = self.grammars.fill(bound, masks.data_ptr(), len(requests))
        # One copy for all rows. The buffer is free again when the tokens have come back.
        return masks.to(self._device, non_blocking=True), faults

    def _batch(self, requests: Sequence[_Request], allowed: Tensor | None) -> SamplingBatch:
        all_params = [request.params for request in requests]
        draws = any(p.temperature > 0 for p in all_params)
        penalised = any(p.penalised for p in all_params)
        numbers, wide, top_k = self._numbers(requests) if draws or penalised else self._unread(len(requests))
        temperature, top_p, min_p, repetition, presence, frequency = numbers
        history = None
        if self._counts is not None and penalised:
            history = History(wide[2].int(), self._counts)
        return SamplingBatch(
            temperature, top_k, top_p, min_p, repetition, presence, frequency, wide[0], wide[1],
            draws=draws,
            filters=any(p.filtered for p in all_params),
            history=history,
            bias=self._bias([request.bias() for request in requests]),
            allowed=allowed,
            top_logprobs=max((p.logprobs or 0 for p in all_params), default=0),
        )  # fmt: skip

    def _numbers(self, requests: Sequence[_Request]) -> tuple[Tensor, Tensor, Tensor]:
        """float32 [6, rows], int64 [3, rows] (seed, place, slot) and top-k: two copies to the device, however many."""
        all_params = [request.params for request in requests]
        floats = [
            (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
            for p in all_params
        ]
        numbers = self._copy(torch.tensor(floats, dtype=torch.float32).view(-1, 6).T.contiguous())
        whole = torch.tensor([(r.seed, r.drawn, r.slot, r.params.top_k) for r in requests], dtype=torch.int64)
        wide = self._copy(whole.view(-1, 4).T.contiguous())
        return numbers, wide[:3], wide[3].int()

    def _unread(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same for rows that all take the likeliest token, which none of these numbers changes: everything off, and
        nothing to copy. Each copy stands between two steps, about 3 us of a step of 1500 (gpt-oss-20b, H200)."""
        if rows not in self._off:
            off = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 0.0]).view(6, 1).expand(6, rows)
            whole = torch.zeros((3, rows), dtype=torch.int64)
            self._off[rows] = self._copy(off.contiguous()), self._copy(whole), self._copy(whole[0].int())
        return self._off[rows]

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
        return Bias(self._copy(tokens), self._copy(values))

    def _copy(self, tensor: Tensor) -> Tensor:
        """To the device, without waiting: torch keeps the pinned memory until it was read."""
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

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
