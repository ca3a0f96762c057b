"""A model on its cache, as the runner's steps use it: all of a step, or the body and the tail of one with prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from microscale.backends.ops import AttentionBatch, Logits, Ops, Sampling
from microscale.engine.step.decode import take_rows
from microscale.engine.step.graphs import Graphs, Task, graph_size, whole
from microscale.engine.step.prompt import PromptInputs, PromptKey, TailKey
from microscale.engine.step.stand_ins import StandIns
from microscale.engine.step.work import Work
from microscale.models.batch import ForwardBatch, KvCache
from microscale.models.config import LayerKind
from microscale.models.decoder import Parted, run_through
from microscale.models.families import ModelConfig
from microscale.models.taps import Taps

if TYPE_CHECKING:
    from torch import Tensor


class HasKind(Protocol):
    @property
    def kind(self) -> LayerKind: ...


class Model(Protocol):
    """What an engine needs of a model."""

    device: torch.device
    page_size: int
    ops: Ops
    sampling: Sampling

    @property
    def config(self) -> ModelConfig: ...

    @property
    def layers(self) -> Sequence[HasKind]: ...

    def new_cache(self, num_pages: dict[LayerKind, int]) -> KvCache: ...

    def forward(self, batch: ForwardBatch, kv: KvCache, taps: Taps | None = None) -> Logits: ...

    def forward_parts(self, batch: ForwardBatch, kv: KvCache, taps: Taps | None = None) -> Parted[Logits]: ...

    def body_parts(
        self, batch: ForwardBatch, kv: KvCache, taps: Taps | None = None
    ) -> Parted[tuple[Tensor, Tensor]]: ...

    def tail(self, q: Tensor, x: Tensor, queries: Mapping[LayerKind, AttentionBatch], kv: KvCache) -> Logits: ...


@dataclass(frozen=True)
class Forward:
    """A model on its cache; what a draft head reads of a step goes to the first rows of ``taps``."""

    model: Model
    kv: KvCache
    taps: Taps | None

    def __call__(self, batch: ForwardBatch) -> Logits:
        return self.model.forward(batch, self.kv, self.tapped(batch.token_ids.shape[0]))

    def parts(self, batch: ForwardBatch) -> Parted[Logits]:
        return self.model.forward_parts(batch, self.kv, self.tapped(batch.token_ids.shape[0]))

    def tapped(self, tokens: int) -> Taps | None:
        return None if self.taps is None else self.taps.first(tokens)


class PromptSteps:
    """Steps of a model with prompts, as graphs of its body and of its tail."""

    def __init__(self, forward: Forward, inputs: PromptInputs, graphs: Graphs, stand_ins: StandIns) -> None:
        self._model, self._kv = forward.model, forward.kv
        self._forward = forward
        self.inputs = inputs
        self._graphs = graphs
        self._stand_ins = stand_ins
        self._gathered: tuple[Tensor, Tensor] | None = None
        """Of the body, for rows that give logits: queries of the last layer and its residual stream."""

    def run(self, schedule: Sequence[Work], key: PromptKey) -> Logits:
        """Logits of the sequences whose next token is due. They last until the next step."""
        key = self._stand_ins.of(key, key.fits)
        self.inputs.fill(schedule, key)
        if self._stand_ins.launches(key):
            self.body(key)
        else:
            self._graphs.run(key, *self.task(key))
        count = sum(work.num_logits for work in schedule)
        if not count:
            return self.tail(TailKey(0, key.pages))
        tail = TailKey(graph_size(count), key.pages)
        return take_rows(self._run_tail(self._stand_ins.of(tail, tail.fits)), slice(count))

    def run_nobody(self, key: PromptKey | TailKey) -> None:
        """A step of padding alone, of which one row gives logits; or the tail of the last step for other rows."""
        if isinstance(key, TailKey):
            self._run_tail(key)
            return
        self.inputs.fill([], key)
        self._graphs.run(key, *self.task(key))
        self._run_tail(TailKey(1, key.pages))

    def task(self, key: PromptKey | TailKey) -> Task[object]:
        if isinstance(key, PromptKey):
            return key.tokens, partial(self.body_parts, key)
        return key.rows, whole(partial(self.tail, key))

    def _run_tail(self, key: TailKey) -> Logits:
        return self._graphs.run(key, key.rows, whole(partial(self.tail, key)))

    @torch.inference_mode()
    def body(self, key: PromptKey) -> None:
        """The model's body on the standing inputs; what the tail needs of it is left in place."""
        run_through(self.body_parts(key))

    def body_parts(self, key: PromptKey) -> Parted[None]:
        """``body`` in parts, for whoever runs it in ``torch.inference_mode``."""
        self.inputs.lay_tables(key)
        found = yield from self._model.body_parts(self.inputs.batch(key), self._kv, self._forward.tapped(key.tokens))
        if self._gathered is None:
            q, x = (
                torch.zeros((self.inputs.most_rows, *each.shape[1:]), dtype=each.dtype, device=each.device)
                for each in found
            )
            self._gathered = q, x
        for each, gathered in zip(found, self._gathered, strict=True):
            torch.index_select(each, 0, self.inputs.rows(key), out=gathered)

    @torch.inference_mode()
    def tail(self, key: TailKey) -> Logits:
        """The model's tail for the first rows, behind a body with tables of the same width."""
        assert self._gathered is not None  # the body has run
        q, x = self._gathered
        kind = self._model.layers[-1].kind
        queries = self.inputs.tail_batch(key.rows, key.pages, kind)
        return self._model.tail(q[: key.rows], x[: key.rows], {kind: queries}, self._kv)
