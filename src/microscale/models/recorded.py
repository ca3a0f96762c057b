"""Which kernels a model may start: its own ``forward`` and sampling, on tensors without memory, at all sizes.

``bind_shapes`` binds a model to weights that are shapes alone (``device="meta"``). ``record`` runs it while launches
are listed and not started. Which kernel runs depends on sizes that the host knows: tokens, sequences, the most new
tokens of a sequence, the width of the page table, rows of logits, and the sampling options of a batch. ``steps`` goes
through them so finely that no size in between starts anything else: ``tests/lab/prove/test_inventory.py`` asks at
random. A layer is recorded once for each kind and format that there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

import torch

from microscale.models.batch import ForwardBatch, KvCache, LogitRows
from microscale.models.config import LayerKind
from microscale.models.dummy_weights import META, ShapeTensors
from microscale.models.families import AnyModel, ModelConfig, build_model, shape_weights
from microscale.planning.ops import (
    LOGITS_BLOCK,
    AttentionBatch,
    Bias,
    History,
    Kernel,
    Launch,
    Logits,
    Ops,
    SamplingBatch,
    StateBatch,
    recording,
)

if TYPE_CHECKING:
    from torch import Tensor

EVERY_SIZE_TO = 72
"""Tokens up to which every number is tried: the paths for few tokens end at 64, or at a whole block of 32."""
SIZES_AN_OCTAVE = 8
MAX_SEQUENCES = 512
MANY_SEQUENCES = 2048
"""Enough for attention's tile for many sequences (``DECODE_MANY``), even with one KV head a rank and 188 SMs."""
FEW_SEQUENCES = 64
"""With fewer, a command never takes that tile, which starts at 69 sequences with 8 KV heads on 78 SMs."""
MAX_TOKENS = 1 << 14
PAGE_SIZE = 16
BIAS_PAIRS = 16
TOP_LOGPROBS = 5


@dataclass(frozen=True)
class Step:
    """The sizes of one step: all that kernels are chosen by."""

    tokens: int
    sequences: int
    longest: int
    """The most new tokens of a sequence."""
    pages: int
    """Width of the page tables."""
    rows: int | None = None
    """Tokens whose logits are wanted; ``None``: all."""
    verify: bool = False
    """Sequences decode with drafts."""

    def batch(self) -> ForwardBatch:
        def of_each(sequences: int, longest: int) -> dict[LayerKind, AttentionBatch]:
            starts, lens, table = _ints(sequences + 1), _ints(sequences), _ints(sequences, self.pages)
            return dict.fromkeys(LayerKind, AttentionBatch(starts, lens, table, longest, self.verify))

        logits = None
        if self.rows is not None:
            each = -(-self.rows // self.sequences)
            logits = LogitRows(_longs(self.rows), of_each(min(self.rows, self.sequences), each))
        slots = dict.fromkeys(LayerKind, _longs(self.tokens))
        starts, lens, read = _ints(self.sequences + 1), _ints(self.sequences), _ints(self.sequences)
        states = StateBatch(starts, lens, read, read[:, None], self.longest, self.verify)
        attention = of_each(self.sequences, self.longest)
        return ForwardBatch(_longs(self.tokens), _longs(self.tokens), attention, slots, logits, states)


@dataclass(frozen=True)
class Wanted:
    """What is run by a command that knows its requests: fewer kernels than a server may start, which takes any."""

    tokens: int
    """Most of one step."""
    sequences: int = 1
    draws: bool = False
    """Tokens are drawn, not the likeliest taken. Nothing filters them or changes their logits."""

    def steps(self, max_context: int, page_size: int, draft_tokens: int) -> Iterator[Step]:
        """As the module's ``steps``, and prompts of every length."""
        for step in steps(max_context, page_size, self.tokens, draft_tokens):
            if step.sequences == MANY_SEQUENCES:
                fits = self.sequences >= FEW_SEQUENCES
            else:
                fits = step.sequences <= self.sequences and (step.verify or step.tokens <= self.tokens)
            if fits:
                yield step
        widest = page_counts(max_context, page_size)[-1]
        for tokens, sequences in product(token_counts(self.tokens), (1, 2)):  # the second is a bucket's padding
            yield Step(tokens, sequences, tokens, widest, 1)

    def has(self, batch: SamplingBatch) -> bool:
        changed = batch.filters or batch.history or batch.bias or batch.allowed is not None or batch.top_logprobs
        return not changed and (self.draws or not batch.draws)


def _ints(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=META)


def _longs(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=META)


def _floats(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=META)


def token_counts(most: int = MAX_TOKENS) -> list[int]:
    """Every number up to ``EVERY_SIZE_TO``, then ``SIZES_AN_OCTAVE`` from each power of two to the next."""
    counts = list(range(1, EVERY_SIZE_TO + 1))
    octave = 64
    while octave < most:
        counts += [octave + octave * part // SIZES_AN_OCTAVE for part in range(SIZES_AN_OCTAVE)]
        octave *= 2
    return sorted({number for number in (*counts, most) if number <= most})


def page_counts(max_context: int, page_size: int = PAGE_SIZE) -> list[int]:
    """Powers of four, and the widest."""
    most = -(-max_context // page_size)
    return sorted({most, *(4**power for power in range(12) if 4**power < most)})


def steps(
    max_context: int, page_size: int = PAGE_SIZE, max_tokens: int = MAX_TOKENS, draft_tokens: int = 0
) -> Iterator[Step]:
    """Decoding in every number; prompts in every larger one; and every way of attention in every width of table.
    ``draft_tokens``: maximum number of drafts of a sequence."""
    widths = page_counts(max_context, page_size)
    for tokens in token_counts(max_tokens):
        if tokens <= MAX_SEQUENCES:
            yield Step(tokens, tokens, 1, widths[-1])
        else:
            yield Step(tokens, 1, tokens, widths[-1])
    # 512 new tokens: from that many query rows on, FP8 keys are copied to bf16, where the table is not too wide.
    shapes = ((1, 1), (9, 1), (65, 1), (MANY_SEQUENCES, 1), (1, 2), (3, 2), (1, 40), (3, 40), (1, 512))
    for pages, (sequences, longest) in product(widths, shapes):
        yield Step(sequences + longest - 1, sequences, longest, pages)
    # As the runner rounds it, the longest sequence has a power of two of tokens.
    drafted = [1 << power for power in range(1, 1 + draft_tokens.bit_length())] if draft_tokens else []
    for pages, sequences, longest in product(widths, (1, 3, 9, 65), drafted):
        yield Step(sequences + longest - 1, sequences, longest, pages, verify=True)
    for rows in (0, 1, 2, 3):
        yield Step(300, 3, 200, widths[-1], rows)


def samplings(rows: int, vocab: int) -> Iterator[SamplingBatch]:
    """Every combination of sampling options."""
    ways = ((False, False), (True, False), (True, True))
    for (draws, filters), history, bias, allowed, top in product(ways, *((False, True),) * 4):
        temperature, top_p, min_p, repetition, presence, frequency = _floats(6, rows)
        yield SamplingBatch(
            temperature, _ints(rows), top_p, min_p, repetition, presence, frequency, _longs(rows), _longs(rows),
            draws=draws,
            filters=filters,
            history=History(_ints(rows), _ints(8, vocab)) if history else None,
            bias=Bias(_ints(rows, BIAS_PAIRS), _floats(rows, BIAS_PAIRS)) if bias else None,
            allowed=_ints(rows, -(-vocab // 32)) if allowed else None,
            top_logprobs=TOP_LOGPROBS if top else 0,
        )  # fmt: skip


def bind_shapes(config: ModelConfig, ops: Ops, page_size: int = PAGE_SIZE) -> AnyModel:
    """The model on weights that are shapes alone."""
    weights = shape_weights(config.shortened(), ShapeTensors())
    return build_model(weights, ops, torch.device(META), page_size, lambda: None)


def _gathered(rows: int, vocab: int) -> Logits:
    """What one of several ranks samples from: all ranks' logits, with blocks of their own."""
    blocks = -(-vocab // LOGITS_BLOCK)
    return Logits(_floats(rows, vocab), _floats(rows, blocks), _ints(rows, blocks), _floats(rows, blocks), LOGITS_BLOCK)


def run_step(model: AnyModel, step: Step, kv: KvCache) -> None:
    """One step, and the greedy choice from its logits."""
    logits = model.forward(step.batch(), kv)
    rows = logits.values.shape[0]
    if rows:
        vocab = model.config.vocab_size
        if not model.config.shard.is_whole:
            logits = _gathered(rows, vocab)
        model.sampling(logits.values, next(samplings(rows, vocab)), logits)


def kernels_by_tokens(config: ModelConfig, ops: Ops, page_size: int, pages: int) -> Callable[[int], tuple[Kernel, ...]]:
    """What the body of a step with prompts starts, by its number of tokens. ``pages``: width of the page tables."""
    if ops.gpu.is_cpu:
        return lambda tokens: ()

    @cache
    def kernels(tokens: int) -> tuple[Kernel, ...]:
        with recording() as kernels:
            model.body(Step(tokens, 2, tokens, pages).batch(), kv)
        return tuple(kernels)

    model = bind_shapes(config, ops, page_size)
    kv = model.new_cache(dict.fromkeys(LayerKind, 4))
    return kernels


def record(
    model: AnyModel, max_tokens: int = MAX_TOKENS, draft_tokens: int = 0, wanted: Wanted | None = None
) -> dict[Kernel, Launch]:
    """Every kernel that the bound model may start in steps of up to ``max_tokens``, with a launch of each; and with
    drafts of up to ``draft_tokens``. With ``wanted`` just those that it takes. Nothing is compiled, and no GPU is
    needed."""
    kv = model.new_cache(dict.fromkeys(LayerKind, 4))
    vocab, context = model.config.vocab_size, model.config.max_context
    if model.states is not None:
        draft_tokens = min(draft_tokens, model.states.most_drafts)
    sizes = steps(context, model.page_size, max_tokens, draft_tokens)
    if wanted is not None:
        sizes = wanted.steps(context, model.page_size, draft_tokens)
    with recording() as kernels:
        for step in sizes:
            run_step(model, step, kv)
        for rows in (1, 3):
            values = _floats(rows, vocab)
            for batch in samplings(rows, vocab):
                if wanted is None or wanted.has(batch):
                    model.sampling(values, batch)
            for top in (0, TOP_LOGPROBS) if wanted is None else ():
                model.sampling.score(values, _ints(rows), top)
    return kernels
