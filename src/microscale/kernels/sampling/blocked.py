"""``triton_sampling``: every row in blocks of 4096 logits, a program each; no sort. Owns the launches and the scratch.

| batch | launches | passes over the logits |
| --- | --- | --- |
| greedy, with the lm_head's blocks | ``pick`` | none |
| greedy, or given tokens | ``scan``, ``pick`` | 1 |
| temperature, min-p | ``scan``, ``weigh``, ``pick`` | 2 |
| top-k, top-p | … and a memset, ``narrow`` three times, ``collect``, ``settle`` | 6 |
| penalties, mask (bias) | … and a second ``scan`` (and ``add_bias``) | 1 more, and a copy |
| top log-probabilities | … and ``top_blocks``, ``top_merge`` | at most 1 more |

Which of them run is the path, which the oracle picks by what the batch asks for (``paths``); nothing waits for the
device.
A row with k of at most the number of blocks needs no ``narrow``: its programs leave at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from microscale.errors import Unsupported
from microscale.hardware import Feature, Gpu
from microscale.kernels.dense.spec import Logits
from microscale.kernels.launch import launch
from microscale.kernels.numbers import MAX_TOP_LOGPROBS
from microscale.kernels.op import Cost, Reason
from microscale.kernels.sampling import draw_jit, search_jit
from microscale.kernels.sampling.cost import logit_bytes
from microscale.kernels.sampling.paths import NO_SCAN, Stages, every
from microscale.kernels.sampling.spec import (
    Sampled,
    SamplingBatch,
    SamplingOp,
    SamplingPath,
    SamplingSpec,
    ScorePath,
    TopLogprobs,
)

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 4096
MAX_BLOCKS = 128
MAX_VOCAB = BLOCK * MAX_BLOCKS
MERGE_OWN = MAX_BLOCKS
# An lm_head's blocks are a few dozen to a few hundred rows: thousands of them.
MERGE_GIVEN = 1024
LEVELS = 8
PAIRS = 256
WIDTH = 32
WARPS = 8
# Without fused multiply-adds a number is the same in every kernel; see draw_jit.
OPTIONS: dict[str, Any] = {"num_warps": WARPS, "enable_fp_fusion": False}
# Ranks and weights of 16 tokens a thread stay in registers: 64 of them before anything is computed.
SETTLE_OPTIONS = OPTIONS | {"maxnreg": 255}


@dataclass(frozen=True)
class _Blocks:
    """Maximum, its place, and sum of exponentials of each block of some logits."""

    max: Tensor  # float32 [rows, blocks]
    argmax: Tensor  # int32 [rows, blocks]
    sum: Tensor  # float32 [rows, blocks]
    merge: int

    @property
    def count(self) -> int:
        return self.max.shape[1]


def _empty_blocks(logits: Tensor) -> _Blocks:
    return _Blocks(logits[:, :0], logits[:, :0], logits[:, :0], MERGE_OWN)


def _given_blocks(blocks: Logits | None) -> _Blocks:
    """Those of the lm_head."""
    assert blocks is not None
    return _Blocks(blocks.block_max, blocks.block_argmax, blocks.block_sum, MERGE_GIVEN)


class _SamplingCall:
    """One call by one path: its sizes, its scratch, its launches."""

    def __init__(
        self, stages: Stages, spec: SamplingSpec, logits: Tensor, batch: SamplingBatch | None, top_logprobs: int
    ) -> None:
        if tuple(logits.shape) != (spec.tokens, spec.vocab):
            raise Unsupported(f"Logits have shape {tuple(logits.shape)}, not {(spec.tokens, spec.vocab)}.")
        if logits.dtype != torch.float32 or logits.stride(-1) != 1:
            raise Unsupported(f"Logits are float32 with contiguous rows, not {logits.dtype}.")
        self.stages = stages
        self.top_logprobs = min(top_logprobs, spec.vocab)
        if self.top_logprobs > MAX_TOP_LOGPROBS:
            raise Unsupported(f"At most {MAX_TOP_LOGPROBS} top log-probabilities, not {self.top_logprobs}.")
        self.rows, self.vocab = spec.tokens, spec.vocab
        self.blocks = -(-spec.vocab // BLOCK)
        self.logits = logits
        self.batch = batch
        self.values = self.empty(self.vocab) if stages.adjust else logits

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """One of each row; float32 unless another type is named."""
        return torch.empty((self.rows, *shape), dtype=dtype or torch.float32, device=self.logits.device)

    def adjustments(self) -> tuple[list[Tensor], dict[str, bool]]:
        """The tensors of penalties and mask with the flags that say which are there."""
        b, none = self.batch, self.logits
        history = None if b is None else b.history
        allowed = None if b is None else b.allowed
        tensors = [none if history is None else history.slots, none if history is None else history.counts]
        tensors += [none if allowed is None else allowed]
        tensors += [none] * 3 if b is None else [b.repetition, b.presence, b.frequency]
        return tensors, {"HISTORY": history is not None, "ALLOWED": allowed is not None}

    @property
    def words(self) -> int:
        return -(-self.vocab // 32)

    def scan(self, source: Tensor, copy: bool) -> _Blocks:
        """The blocks of ``source``; ``copy``: the adjusted logits are made on the way."""
        found = _Blocks(
            self.empty(self.blocks), self.empty(self.blocks, dtype=torch.int32), self.empty(self.blocks), MERGE_OWN
        )
        tensors, flags = self.adjustments()
        flags = flags if copy else dict.fromkeys(flags, False)
        arguments = (
            source, self.values, *tensors, found.max, found.argmax, found.sum,
            self.vocab, source.stride(0), self.words,
        )  # fmt: skip
        constants = {"BLOCK": BLOCK, "COPY": copy, **flags}
        launch(draw_jit.scan, (self.rows, self.blocks), arguments, constants, OPTIONS)
        return found

    def add_bias(self) -> None:
        assert self.batch is not None
        assert self.batch.bias is not None
        tokens, values = self.batch.bias.tokens, self.batch.bias.values
        tensors, flags = self.adjustments()
        arguments = (
            self.logits, self.values, tokens, values, *tensors,
            self.vocab, self.logits.stride(0), self.words, tokens.shape[1],
        )  # fmt: skip
        launch(draw_jit.add_bias, (self.rows,), arguments, {"PAIRS": PAIRS, **flags}, OPTIONS)

    def cut(self, blocks: _Blocks) -> Tensor:
        """The least rank of each row that top-k and top-p keep."""
        assert self.batch is not None
        b, grid, rounds = self.batch, (self.rows, self.blocks), search_jit.TURNS.value
        # Counts and weights of every round, and behind them the lists' lengths: one memset.
        tables = self.rows * rounds * 2 * LEVELS
        zeros = torch.zeros(tables + self.rows, dtype=torch.int64, device=self.logits.device)
        lengths = zeros[tables:].view(torch.int32)
        listed = self.empty(self.vocab, dtype=torch.int32)
        cutoff = self.empty(dtype=torch.int64)
        numbers = (self.values, blocks.max, b.temperature, b.top_k, b.top_p, zeros)
        sizes = (self.vocab, self.values.stride(0))
        constants = {"MERGE": blocks.merge, "LEVELS": LEVELS}
        for turn in range(rounds):
            own = {"BLOCK": BLOCK, "ROUND": turn, **constants}
            launch(search_jit.narrow, grid, (*numbers, *sizes), own, OPTIONS)
        constants["ROUNDS"] = rounds
        arguments: tuple[Any, ...] = (*numbers, listed, lengths, *sizes)
        launch(search_jit.collect, grid, arguments, {"BLOCK": BLOCK, **constants}, OPTIONS)
        arguments = (*numbers, listed, lengths, cutoff, *sizes, blocks.count)
        launch(search_jit.settle, (self.rows,), arguments, {"CHUNK": BLOCK, **constants}, SETTLE_OPTIONS)
        return cutoff

    def weigh(self, blocks: _Blocks, cutoff: Tensor | None) -> Tensor:
        """The weight of each block that may be drawn."""
        assert self.batch is not None
        b, weights = self.batch, self.empty(self.blocks, dtype=torch.int64)
        arguments = (
            self.values, blocks.max, b.temperature, b.min_p, weights if cutoff is None else cutoff, weights,
            self.vocab, self.values.stride(0),
        )  # fmt: skip
        constants = {"BLOCK": BLOCK, "MERGE": blocks.merge, "FILTER": cutoff is not None}
        launch(draw_jit.weigh, (self.rows, self.blocks), arguments, constants, OPTIONS)
        return weights

    def finish(
        self,
        raw: _Blocks,
        weights: Tensor | None,
        cutoff: Tensor | None,
        sampled: _Blocks | None = None,
        given: Tensor | None = None,
    ) -> Sampled:
        """Tokens and log-probabilities, and the likeliest where they were asked for."""
        sampled = raw if sampled is None else sampled
        # Each begins at a multiple of 16 bytes, as the kernel was proved for.
        together = torch.empty((3, -(-self.rows // 4) * 4), dtype=torch.int32, device=self.logits.device)
        tokens, logprobs, status = together[:, : self.rows]
        tokens, logprobs = tokens if given is None else given, logprobs.view(torch.float32)
        b, none = self.batch, self.logits
        history = None if b is None or given is not None else b.history
        drawn = [none] * 6
        if b is not None and weights is not None:
            drawn = [b.temperature, b.min_p, weights if cutoff is None else cutoff, weights, b.seed, b.position]
        if self.rows:
            arguments = (
                self.logits, raw.max, raw.sum, self.values, sampled.max, sampled.argmax, *drawn,
                none if history is None else history.slots, none if history is None else history.counts,
                tokens, logprobs, status, self.vocab, self.logits.stride(0), self.values.stride(0), raw.count,
            )  # fmt: skip
            constants = {
                "BLOCK": BLOCK, "MERGE": raw.merge, "DRAW": weights is not None, "FILTER": cutoff is not None,
                "HISTORY": history is not None, "GIVEN": given is not None,
            }  # fmt: skip
            launch(draw_jit.pick, (self.rows,), arguments, constants, OPTIONS)
        top = self.top(raw) if self.stages.top else None
        return Sampled(tokens, logprobs, status, top, together if given is None else None)

    def top(self, raw: _Blocks) -> TopLogprobs:
        count = self.top_logprobs
        top = TopLogprobs(self.empty(count, dtype=torch.int32), self.empty(count))
        found = self.empty(self.blocks, WIDTH, dtype=torch.int64)
        if self.rows:
            constants = {"MERGE": MERGE_OWN, "WIDTH": WIDTH}
            arguments: tuple[Any, ...] = (self.logits, raw.max, found, self.vocab, self.logits.stride(0), count)
            grid = (self.rows, self.blocks)
            launch(search_jit.top_blocks, grid, arguments, {"BLOCK": BLOCK, **constants}, OPTIONS)
            arguments = (found, raw.max, raw.sum, top.tokens, top.logprobs, self.blocks, count)
            launch(search_jit.top_merge, (self.rows,), arguments, constants, OPTIONS)
        return top


def _run(
    stages: Stages, spec: SamplingSpec, gpu: Gpu, logits: Tensor, batch: SamplingBatch, blocks: Logits | None
) -> Sampled:
    job = _SamplingCall(stages, spec, logits, batch, batch.top_logprobs)
    if not spec.tokens:
        return job.finish(_empty_blocks(logits), None, None)
    raw = job.scan(logits, copy=stages.adjust) if stages.scan else _given_blocks(blocks)
    if stages.bias:
        job.add_bias()
    sampled = job.scan(job.values, copy=False) if stages.adjust else raw
    cutoff = job.cut(sampled) if stages.cut else None
    weights = job.weigh(sampled, cutoff) if stages.weigh else None
    return job.finish(raw, weights, cutoff, sampled)


def _score(stages: Stages, spec: SamplingSpec, gpu: Gpu, logits: Tensor, tokens: Tensor, top_logprobs: int) -> Sampled:
    job = _SamplingCall(stages, spec, logits, None, top_logprobs)
    raw = job.scan(logits, copy=False) if spec.tokens else _empty_blocks(logits)
    return job.finish(raw, None, None, given=tokens.int().contiguous())


class TritonSampling(SamplingOp):
    """Integer weights, so that no sum depends on its order."""

    name = "triton_sampling"
    paths = tuple(SamplingPath(stages.name, NO_SCAN, stages.supports, partial(_run, stages)) for stages in every())
    score_paths = tuple(
        ScorePath(name, NO_SCAN, stages.supports, partial(_score, stages))
        for name, stages in (
            ("given tokens", Stages()),
            ("given tokens, top log-probabilities", Stages(top=True)),
        )
    )

    def supports(self, spec: SamplingSpec, gpu: Gpu) -> Reason | None:
        if not gpu.has(Feature.MMA_BF16):
            return f"runs on GPUs, and this is a {gpu.name}"
        if spec.vocab > MAX_VOCAB:
            return f"samples from up to {MAX_VOCAB} tokens, not {spec.vocab}"
        return None

    def cost(self, spec: SamplingSpec, gpu: Gpu) -> Cost:
        return Cost(logit_bytes(spec), 0, efficiency=0.3)
