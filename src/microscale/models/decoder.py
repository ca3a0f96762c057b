"""How every family's model runs its layers: all of them, or in two parts where few tokens give logits.

The *body* is every layer up to the last one's queries: it runs all tokens and writes all keys and values. The *tail* is
the rest, attention of the last layer on: it runs the tokens whose logits are wanted. A prompt of a thousand tokens
wants one. The two are apart because a captured graph of the body is of one number of tokens, and one of the tail of one
number of logits.

The residual stream may be tapped between layers (``taps.py``), for a draft head. Taps change no logits:
nothing else is computed in another way, and without taps nothing is done at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar, cast

import torch

from microscale.models.batch import ForwardBatch, KvCache
from microscale.models.config import LayerKind, ModelConfig
from microscale.models.taps import Taps
from microscale.models.weights import Weights, tied_lm_head
from microscale.planning.ops import AttentionBatch, DenseWeights, Logits, Ops, PagedKv, RecurrentSpec, RopeTable

if TYPE_CHECKING:
    from torch import Tensor

State = TypeVar("State")
"""What goes from layer to layer next to the residual stream: what is still to be added to it, or its norm."""
Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")


def without_gradients(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """``torch.inference_mode`` as a decorator that does not import torch before the function is called."""

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with torch.inference_mode():
            return function(*args, **kwargs)

    return run


class DecoderLayer(Protocol[State]):
    """One layer, bound to its kernels: its bound ops are attributes, and ``small`` is one of them."""

    @property
    def kind(self) -> LayerKind: ...

    @property
    def uses(self) -> Mapping[str, str]:
        """Attribute → its name in plans. ``microscale profile`` times each."""

    def forward(self, x: Tensor, state: State, batch: ForwardBatch, kv: Any, rope: RopeTable) -> tuple[Tensor, State]:
        """``x [tokens, hidden]``, the residual stream, and the state, one layer on."""


class AttentionLayer(DecoderLayer[State], Protocol[State]):
    """A layer that can be run in two parts. The last one of every model is one."""

    def queries(
        self, x: Tensor, state: State, batch: ForwardBatch, kv: PagedKv, rope: RopeTable
    ) -> tuple[Tensor, Tensor]:
        """The layer up to its queries: they, and the residual stream. Keys and values are in the cache."""

    def attend(self, q: Tensor, x: Tensor, kv: PagedKv, queries: AttentionBatch) -> tuple[Tensor, State]:
        """The rest of the layer, for any of the tokens."""


class Decoder(ABC, Generic[State]):
    """A model of such layers. A family defines how layers are bound, and how the model begins and ends.

    Loading reads one layer at a time; a layer's checkpoint bytes are freed as soon as it is packed.
    """

    config: ModelConfig
    layers: Sequence[DecoderLayer[State]]
    softcap: float | None = None

    def __init__(
        self,
        weights: Weights[Any, Any],
        ops: Ops,
        device: torch.device,
        page_size: int = 16,
        on_layer: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_layer`` is called after each layer."""
        config = weights.config
        self.config = config
        self.ops = ops
        self.device = device
        self.page_size = page_size
        table = weights.embed(device)
        self.embed = ops.embed(table)
        layers = []
        for layer_idx in range(config.num_layers):
            layers.append(self.bind_layer(layer_idx, weights.layer(layer_idx, device)))
            on_layer()
        self.layers = layers
        self.bind_norm(weights.norm(device))
        lm_head = tied_lm_head(table, config) if config.tied else weights.lm_head(device)
        self.lm_head = ops.dense("lm_head", DenseWeights(lm_head), self.softcap)
        self.sampling = ops.sampling(config.vocab_size)
        self.kv_scales = weights.kv_scales() if ops.kv_dtype == torch.uint8 else ()
        self.rope: Mapping[LayerKind, RopeTable] = ops.computed(self.rope_tables)

    @abstractmethod
    def bind_layer(self, layer_idx: int, tensors: Any) -> DecoderLayer[State]:
        """One layer on its kernels, bound in the order in which they run: see ``models/outline.py``."""

    @abstractmethod
    def bind_norm(self, weight: Tensor) -> None:
        """Keep the final norm. All layers are bound."""

    @abstractmethod
    def rope_tables(self) -> Mapping[LayerKind, RopeTable]: ...

    @abstractmethod
    def head_shapes(self) -> Mapping[LayerKind, tuple[int, int]]:
        """KV heads and their size, for each kind of layer."""

    def new_cache(self, num_pages: Mapping[LayerKind, int]) -> KvCache:
        """An empty cache with this many pages, or slots, for each kind of layer."""
        kinds, shapes = self.config.layer_kinds, self.head_shapes()
        dtype, scales = self.ops.kv_dtype, self.kv_scales
        return KvCache.allocate(kinds, num_pages, self.page_size, shapes, dtype, self.device, scales, self.states)

    @property
    def states(self) -> RecurrentSpec | None:
        """Of the layers with states, if the family has any."""
        return None

    @abstractmethod
    def begin(self, token_ids: Tensor) -> tuple[Tensor, State]:
        """The embedded tokens, and the state that the first layer takes."""

    @abstractmethod
    def end(self, x: Tensor, state: State) -> Logits:
        """Logits ``[rows, vocabulary]`` in float32 from what the last layer gives; of the rank's rows of lm_head."""

    @abstractmethod
    def stream(self, x: Tensor, state: State, out: Tensor) -> None:
        """The residual stream between two layers, with all that is still to be added to it, into ``out``."""

    @without_gradients
    def forward(self, batch: ForwardBatch, kv: KvCache, taps: Taps | None = None) -> Logits:
        """Logits ``[rows, vocabulary]`` in float32 for ``batch.logits``. The new tokens' keys and values go to the
        cache, and what is tapped to ``taps``."""
        wanted = batch.logits
        if wanted is not None:
            q, x = (part.index_select(0, wanted.rows) for part in self.body(batch, kv, taps))
            return self.tail(q, x, wanted.attention, kv)
        return self.end(*self._run(len(self.layers), batch, kv, taps))

    @without_gradients
    def body(self, batch: ForwardBatch, kv: KvCache, taps: Taps | None = None) -> tuple[Tensor, Tensor]:
        """Queries of the last layer and its residual stream, for all tokens.

        A tap after the last layer needs all tokens there too; the tail then computes its few rows again.
        """
        x, state = self._run(len(self.layers) - 1, batch, kv, taps)
        last, last_kv = self._last, kv.layers[-1]
        q, x = last.queries(x, state, batch, last_kv, self.rope[last.kind])
        if taps is not None and taps.at(len(self.layers)) is not None:
            self._tap(taps, len(self.layers), *last.attend(q, x, last_kv, batch.attention[last.kind]))
        return q, x

    @without_gradients
    def tail(self, q: Tensor, x: Tensor, queries: Mapping[LayerKind, AttentionBatch], kv: KvCache) -> Logits:
        """Logits of some tokens, from what the body gave for them."""
        last = self._last
        return self.end(*last.attend(q, x, kv.layers[-1], queries[last.kind]))

    @property
    def _last(self) -> AttentionLayer[State]:
        return cast("AttentionLayer[State]", self.layers[-1])

    def _run(self, num_layers: int, batch: ForwardBatch, kv: KvCache, taps: Taps | None) -> tuple[Tensor, State]:
        """The first layers, and the taps up to the end of them."""
        assert len(kv.layers) == len(self.layers)
        x, state = self.begin(batch.token_ids)
        for place in range(num_layers):
            if taps is not None:
                self._tap(taps, place, x, state)
            layer = self.layers[place]
            x, state = layer.forward(x, state, batch, kv.layers[place], self.rope[layer.kind])
        if taps is not None:
            self._tap(taps, num_layers, x, state)
        return x, state

    def _tap(self, taps: Taps, place: int, x: Tensor, state: State) -> None:
        out = taps.at(place)
        if out is not None:
            self.stream(x, state, out)
