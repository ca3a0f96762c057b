"""Runs a planned step on a model and gives the logits of the requests whose next token is due."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from microscale.backends.ops import Logits, Sampling
from microscale.engine.inputs import Chunk, build_batch
from microscale.engine.pages import PagePool
from microscale.engine.scheduler import Work
from microscale.models.batch import ForwardBatch, KvCache
from microscale.models.config import GptOssConfig, LayerKind


class Model(Protocol):
    """What an engine needs of a model."""

    config: GptOssConfig
    device: torch.device
    page_size: int
    sampling: Sampling

    def new_cache(self, num_pages: dict[LayerKind, int]) -> KvCache: ...

    def forward(self, batch: ForwardBatch, kv: KvCache) -> Logits: ...


class ModelRunner:
    """A model and its KV cache, whose pages ``pools`` hand out."""

    def __init__(self, model: Model, pools: Mapping[LayerKind, PagePool]) -> None:
        self._model = model
        self._pools = pools
        self._kv = model.new_cache({kind: pool.num_pages for kind, pool in pools.items()})

    def forward(self, plan: Sequence[Work]) -> Logits:
        """Logits, one row for each part of the plan that wants them, in its order."""
        chunks = [self._chunk(work) for work in plan]
        return self._model.forward(build_batch(chunks, self._model.page_size, self._model.device), self._kv)

    def _chunk(self, work: Work) -> Chunk:
        pages = {kind: pool.pages_of(work.request.request_id) for kind, pool in self._pools.items()}
        tokens = work.request.tokens[work.first : work.first + work.count]
        return Chunk(tokens, work.first, pages, work.wants_logits)
