"""Runs a scheduled step on a model and gives the logits of the requests whose next token is due.

Steps in which every sequence decodes one token run from standing inputs, on a GPU as a captured graph (``decode``) if
all that was chosen for the model can be captured. All others, with prompts among them, are laid out anew and run as
they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from microscale.backends.ops import Logits, Ops, Sampling
from microscale.engine.step.decode import DecodeGraphs, DecodeInputs, take_rows
from microscale.engine.step.inputs import Chunk, build_batch
from microscale.engine.step.limits import Limits
from microscale.engine.step.pages import PagePool
from microscale.engine.step.threads import StepThreads
from microscale.engine.step.work import Work
from microscale.models.batch import ForwardBatch, KvCache
from microscale.models.config import LayerKind
from microscale.models.families import ModelConfig


class Model(Protocol):
    """What an engine needs of a model."""

    device: torch.device
    page_size: int
    ops: Ops
    sampling: Sampling

    @property
    def config(self) -> ModelConfig: ...

    def new_cache(self, num_pages: dict[LayerKind, int]) -> KvCache: ...

    def forward(self, batch: ForwardBatch, kv: KvCache) -> Logits: ...


class ModelRunner:
    """A model and its KV cache, whose pages ``pools`` hand out."""

    def __init__(
        self, model: Model, pools: Mapping[LayerKind, PagePool], limits: Limits, *, enforce_eager: bool = False
    ) -> None:
        self._model = model
        self._pools = pools
        # One page more than the pool hands out: rows that fill up a graph's batch look there.
        self._kv = model.new_cache({kind: pool.num_pages + 1 for kind, pool in pools.items()})
        longest = min(limits.max_model_len, pools[LayerKind.FULL].num_pages * limits.page_size)
        max_pages = -(-longest // limits.page_size)
        self._inputs = DecodeInputs(pools, limits.page_size, limits.max_num_seqs, max_pages, model.device)
        # No method of this object: a ring of references would keep the cache and the graphs after it is gone.
        self._forward = partial(model.forward, kv=self._kv)
        self._threads = StepThreads(model.ops.plan, model.ops.gpu, model.ops.threads)
        self._graphs = DecodeGraphs(self._forward, model.device, model.ops.uncapturable, enabled=not enforce_eager)

    def forward(self, schedule: Sequence[Work], tokens: Tensor | None = None) -> Logits:
        """Logits, as many rows as each part of the schedule wants, in its order. They last until the next step.

        ``tokens`` (int32 on the device, one a part) are those of a schedule that runs ahead. Nothing here waits for the
        device while such plans follow one another.
        """
        self._threads.give(sum(work.count for work in schedule))
        if all(work.decodes for work in schedule):
            key = self._inputs.key(schedule)
            self._inputs.fill(schedule, key.rows, tokens)
            return take_rows(self._graphs.run(self._inputs.batch(key), key), slice(len(schedule)))
        chunks = [self._chunk(work) for work in schedule]
        return self._forward(build_batch(chunks, self._model.page_size, self._model.device))

    def _chunk(self, work: Work) -> Chunk:
        pages = {kind: pool.pages_of(work.request.request_id) for kind, pool in self._pools.items()}
        tokens = work.request.tokens[work.first : work.first + work.count]
        return Chunk(tokens, work.first, pages, work.num_logits)
