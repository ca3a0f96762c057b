"""Complete a fixed set of prompts together: prefill in chunks, then decode one token a step until all are done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from microscale.engine.inputs import Chunk, build_batch
from microscale.engine.pages import PagePool
from microscale.engine.sampler import Sampler, SamplingParams
from microscale.errors import BadRequest
from microscale.models.batch import ForwardBatch, KvCache
from microscale.models.config import GptOssConfig, LayerKind


class Model(Protocol):
    """What generation needs of a model."""

    config: GptOssConfig
    device: torch.device
    page_size: int

    def new_cache(self, num_pages: dict[LayerKind, int]) -> KvCache: ...

    def forward(self, batch: ForwardBatch, kv: KvCache) -> Tensor: ...


@dataclass(frozen=True)
class Completion:
    """What one prompt became."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """``stop`` (an end token, which is the last of ``token_ids``) or ``length``."""


@dataclass
class _Sequence:
    index: int
    tokens: list[int]
    num_prompt: int
    sampler: Sampler
    num_cached: int = 0
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


def check_prompt(prompt: Sequence[int], max_tokens: int, config: GptOssConfig) -> None:
    """Refuse what the model cannot be asked."""
    if not prompt:
        raise BadRequest("The prompt is empty; give at least one token id.")
    for token in prompt:
        if not 0 <= token < config.vocab_size:
            raise BadRequest(f"Token id {token} is not in the vocabulary of {config.vocab_size}.")
    if len(prompt) + max_tokens > config.max_context:
        raise BadRequest(
            f"{len(prompt)} prompt tokens and {max_tokens} new ones exceed the model's context of {config.max_context}."
        )


def check_budget(max_num_batched_tokens: int) -> None:
    """Refuse a step that holds no token."""
    if max_num_batched_tokens < 1:
        raise BadRequest(f"max_num_batched_tokens is {max_num_batched_tokens}; a step takes at least one token.")


class Generation:
    """One batch of prompts on its way. ``step()`` runs the model once; ``run()`` until every prompt is done."""

    def __init__(
        self, model: Model, prompts: Sequence[Sequence[int]], params: SamplingParams, max_num_batched_tokens: int = 2048
    ) -> None:
        check_budget(max_num_batched_tokens)
        for prompt in prompts:
            check_prompt(prompt, params.max_tokens, model.config)
        self._model = model
        self._params = params
        self._budget = max_num_batched_tokens
        self._sequences = [_Sequence(i, list(p), len(p), Sampler(params)) for i, p in enumerate(prompts)]
        pages = sum(-(-(len(p) + params.max_tokens) // model.page_size) for p in prompts)
        self._pools = {kind: PagePool(pages) for kind in LayerKind}
        self._kv = model.new_cache(dict.fromkeys(LayerKind, pages))

    def run(self, on_step: Callable[[int], None] = lambda tokens: None) -> list[Completion]:
        """All completions; ``on_step`` hears how many tokens each step produced."""
        while any(s.finish_reason is None for s in self._sequences):
            on_step(self.step())
        return [Completion(s.tokens[s.num_prompt :], s.logprobs, s.finish_reason or "") for s in self._sequences]

    def step(self) -> int:
        """Schedule, run, sample. Returns the number of tokens produced."""
        scheduled = list(self._schedule())
        chunks = [self._chunk(sequence, count) for sequence, count in scheduled]
        logits = self._model.forward(build_batch(chunks, self._model.page_size, self._model.device), self._kv)
        rows = iter(logits)
        produced = 0
        for (sequence, count), chunk in zip(scheduled, chunks, strict=True):
            sequence.num_cached += count
            if chunk.wants_logits:
                self._append(sequence, next(rows))
                produced += 1
        return produced

    def _schedule(self) -> Iterator[tuple[_Sequence, int]]:
        """Sequences and how many of their tokens run now, within the budget; decoding ones first."""
        left = self._budget
        live = [s for s in self._sequences if s.finish_reason is None]
        for sequence in sorted(live, key=lambda s: (len(s.tokens) - s.num_cached > 1, s.index)):
            count = min(len(sequence.tokens) - sequence.num_cached, left)
            if count:
                left -= count
                yield sequence, count

    def _chunk(self, sequence: _Sequence, count: int) -> Chunk:
        end = sequence.num_cached + count
        for pool in self._pools.values():
            pool.grow(sequence.index, -(-end // self._model.page_size))
        return Chunk(
            token_ids=sequence.tokens[sequence.num_cached : end],
            first_position=sequence.num_cached,
            pages={kind: pool.pages_of(sequence.index) for kind, pool in self._pools.items()},
            wants_logits=end == len(sequence.tokens),
        )

    def _append(self, sequence: _Sequence, logits: Tensor) -> None:
        token, logprob = sequence.sampler.sample(logits)
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        if token in self._model.config.eos_token_ids and not self._params.ignore_eos:
            sequence.finish_reason = "stop"
        elif len(sequence.logprobs) == self._params.max_tokens:
            sequence.finish_reason = "length"
        if sequence.finish_reason is not None:
            for pool in self._pools.values():
                pool.release(sequence.index)
