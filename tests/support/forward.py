"""Runs a model over whole prompts and keeps the logits of every position."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from microscale.models.batch import KvCache
from microscale.models.config import PAGED, LayerKind
from microscale.models.families import AnyModel
from microscale.planning.ops import StateCache
from microscale_lab.batches import SequenceChunk, build_batch

E4M3_NAN = 0x7F


def poison(kv: KvCache) -> KvCache:
    """NaN in every slot: a position that is read before it was written would show."""
    for layer in kv.layers:
        for pages in (layer.state, layer.columns) if isinstance(layer, StateCache) else (layer.k, layer.v):
            pages.fill_(E4M3_NAN if pages.dtype == torch.uint8 else math.nan)
    return kv


def all_logits(
    model: AnyModel, prompts: list[list[int]], chunk: int, on_step: Callable[[Sequence[int]], None] | None = None
) -> list[Tensor]:
    """Logits at every position of each prompt, the prompts together in one batch, ``chunk`` tokens of each at a time.

    Pages of the sequences interleave and run backwards, and the two kinds of layer use different ones. ``on_step`` is
    told before each step which tokens it computes, counted over all prompts one after the other.
    """
    return _logits(model, prompts, chunk, None, on_step)


def last_logits(model: AnyModel, prompts: list[list[int]], chunk: int, wanted: int) -> list[Tensor]:
    """As ``all_logits``, but only those of each prompt's ``wanted`` last positions that fall into its last chunk."""
    return _logits(model, prompts, chunk, wanted)


def _logits(
    model: AnyModel,
    prompts: list[list[int]],
    chunk: int,
    wanted: int | None,
    on_step: Callable[[Sequence[int]], None] | None = None,
) -> list[Tensor]:
    size = model.page_size
    counts = [-(-len(p) // size) for p in prompts]
    kv = poison(model.new_cache(dict.fromkeys(LayerKind, sum(counts))))
    free = {LayerKind.FULL: list(range(sum(counts))), LayerKind.SLIDING: list(range(sum(counts)))[::-1]}
    pages = [
        {kind: [free[kind].pop() for _ in range(count)] for kind in PAGED} | {LayerKind.LINEAR: [len(prompts) - place]}
        for place, count in enumerate(counts, start=1)
    ]
    rows: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk):
        live = [i for i, prompt in enumerate(prompts) if len(prompt) > start]
        chunks = []
        for i in live:
            tokens = prompts[i][start : start + chunk]
            ends = start + chunk >= len(prompts[i])
            count = len(tokens) if wanted is None else min(wanted, len(tokens)) * ends
            chunks.append(SequenceChunk(tokens, start, pages[i], num_logits=count))
        if on_step is not None:
            begins = [sum(map(len, prompts[:i])) + start for i in live]
            on_step(
                [at for begin, c in zip(begins, chunks, strict=True) for at in range(begin, begin + len(c.token_ids))]
            )
        logits = model.forward(build_batch(chunks, size, model.device), kv).values
        for i, part in zip(live, logits.split([c.num_logits for c in chunks]), strict=True):
            rows[i].append(part)
    return [torch.cat(parts) for parts in rows]
