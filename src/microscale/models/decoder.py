"""How every family's model runs its layers: all of them, or in two parts where few tokens give logits.

The *body* is every layer up to the last one's queries: it runs all tokens and writes all keys and values. The *tail* is
the rest, attention of the last layer on: it runs the tokens whose logits are wanted. A prompt of a thousand tokens
wants one. The two are apart because a captured graph of the body is of one number of tokens, and one of the tail of one
number of logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from microscale.backends.ops import AttentionBatch, Logits, PagedKv, RopeTable
from microscale.models.batch import ForwardBatch, KvCache
from microscale.models.config import LayerKind

State = TypeVar("State")
"""What goes from layer to layer beside the residual stream: what is still to be added to it, or its norm."""


class GaveWay(Exception):
    """A step was left undone between two layers, because its owner has something better to do."""


class DecoderLayer(Protocol[State]):
    """One layer, bound to its kernels."""

    @property
    def kind(self) -> LayerKind: ...

    def forward(
        self, x: Tensor, state: State, batch: ForwardBatch, kv: PagedKv, rope: RopeTable
    ) -> tuple[Tensor, State]:
        """``x [tokens, hidden]``, the residual stream, and the state, one layer on."""

    def queries(
        self, x: Tensor, state: State, batch: ForwardBatch, kv: PagedKv, rope: RopeTable
    ) -> tuple[Tensor, Tensor]:
        """The layer up to its queries: they, and the residual stream. Keys and values are in the cache."""

    def attend(self, q: Tensor, x: Tensor, kv: PagedKv, queries: AttentionBatch) -> tuple[Tensor, State]:
        """The rest of the layer, for any of the tokens."""


class Decoder(ABC, Generic[State]):
    """A model of such layers. A family says how it begins and how it ends."""

    rope: Mapping[LayerKind, RopeTable]
    layers: Sequence[DecoderLayer[State]]
    _is_due: Callable[[], bool] | None = None

    @contextmanager
    def giving_way(self, is_due: Callable[[], bool]) -> Iterator[None]:
        """Inside, a step raises ``GaveWay`` before its next layer once ``is_due``. For steps that nobody waits for."""
        self._is_due = is_due
        try:
            yield
        finally:
            self._is_due = None

    @abstractmethod
    def begin(self, token_ids: Tensor) -> tuple[Tensor, State]:
        """The embedded tokens, and the state that the first layer takes."""

    @abstractmethod
    def end(self, x: Tensor, state: State) -> Logits:
        """Logits ``[rows, vocabulary]`` in float32 from what the last layer gives."""

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KvCache) -> Logits:
        """Logits ``[rows, vocabulary]`` in float32 for ``batch.logits``; the new tokens' KV goes to the cache."""
        wanted = batch.logits
        if wanted is not None:
            q, x = self.body(batch, kv)
            return self.tail(q[wanted.rows], x[wanted.rows], wanted.attention, kv)
        x, state = self.begin(batch.token_ids)
        for layer, layer_kv in self._in_turn(kv):
            x, state = layer.forward(x, state, batch, layer_kv, self.rope[layer.kind])
        return self.end(x, state)

    @torch.inference_mode()
    def body(self, batch: ForwardBatch, kv: KvCache) -> tuple[Tensor, Tensor]:
        """Queries of the last layer and its residual stream, of all tokens."""
        x, state = self.begin(batch.token_ids)
        for layer, layer_kv in self._in_turn(kv):
            if layer is not self.layers[-1]:
                x, state = layer.forward(x, state, batch, layer_kv, self.rope[layer.kind])
        return layer.queries(x, state, batch, layer_kv, self.rope[layer.kind])

    def _in_turn(self, kv: KvCache) -> Iterator[tuple[DecoderLayer[State], PagedKv]]:
        """Each layer with its part of the cache, as long as nothing else is due."""
        for layer, layer_kv in zip(self.layers, kv.layers, strict=True):
            if self._is_due is not None and self._is_due():
                raise GaveWay
            yield layer, layer_kv

    @torch.inference_mode()
    def tail(self, q: Tensor, x: Tensor, queries: Mapping[LayerKind, AttentionBatch], kv: KvCache) -> Logits:
        """Logits of some tokens, from what the body gave for them."""
        last = self.layers[-1]
        return self.end(*last.attend(q, x, kv.layers[-1], queries[last.kind]))
