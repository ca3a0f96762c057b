"""The record of a model family, all that the program must know to load and run its models; and what it asks of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from microscale.backends.ops import AttentionBatch, Dense, Embedding, Logits, Ops, Sampling
from microscale.models.batch import ForwardBatch, KvCache
from microscale.models.config import LayerKind
from microscale.models.dummy_weights import TensorMaker
from microscale.models.random_checkpoint import Published
from microscale.models.taps import Taps
from microscale.parallel.sharding import Shard

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Config = TypeVar("Config")
Weights = TypeVar("Weights")
Model = TypeVar("Model")
Overrides = Mapping[str, object]
"""Of keys of a config.json, as published."""


class ModelConfig(Protocol):
    """What the rest of the program asks of a family's config."""

    @property
    def num_layers(self) -> int: ...

    @property
    def hidden(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def sliding_window(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def shard(self) -> Shard: ...

    def sharded(self, shard: Shard) -> Self:
        """One rank's part of the model, or why it cannot be split so."""

    def shortened(self) -> Self:
        """The model with one layer of each sort: all its kernels, in the time of a few layers."""


class ModelWeights(Protocol):
    """Opened weights. What else they give is between them and their model."""

    @property
    def config(self) -> ModelConfig: ...

    def reading(self, device: torch.device, on_read: Callable[[int, int], None]) -> AbstractContextManager[None]:
        """Inside of it a model is built. ``on_read`` hears how many bytes of all were read, if any are."""


class AnyLayer(Protocol):
    """A decoder layer: its bound ops are attributes, and ``small`` is one of them."""

    @property
    def kind(self) -> LayerKind: ...

    @property
    def uses(self) -> Mapping[str, str]:
        """Attribute → what plans call it. ``microscale profile`` times each."""


class AnyModel(Protocol):
    """What the rest of the program asks of a model."""

    ops: Ops
    device: torch.device
    page_size: int
    embed: Embedding
    lm_head: Dense
    sampling: Sampling

    @property
    def layers(self) -> Sequence[AnyLayer]: ...

    @property
    def config(self) -> ModelConfig: ...

    def new_cache(self, num_pages: dict[LayerKind, int]) -> KvCache: ...

    def forward(self, batch: ForwardBatch, kv: KvCache, taps: Taps | None = None) -> Logits: ...

    def body(self, batch: ForwardBatch, kv: KvCache, taps: Taps | None = None) -> tuple[Tensor, Tensor]: ...

    def tail(self, q: Tensor, x: Tensor, queries: Mapping[LayerKind, AttentionBatch], kv: KvCache) -> Logits: ...


@dataclass(frozen=True)
class Family(Generic[Config, Weights, Model]):
    """One family: architectures that one model file computes."""

    model_types: tuple[str, ...]
    """What ``model_type`` is in a config.json of it."""
    config: type[Config]
    presets: Mapping[str, Config]
    """Known shapes, for models without a checkpoint and for plans made ahead."""
    preset: Callable[[str, Config, Overrides], Config]
    """A preset by its name, with overrides."""
    read: Callable[[Path, Overrides], Config]
    """The config of a checkpoint's folder, with overrides."""
    open: Callable[[Path, Overrides, Shard], Weights]
    """One rank's part of a checkpoint, which is checked against its own config in full."""
    dummy: Callable[[Config, TensorMaker], Weights]
    """Weights without a checkpoint: random ones, or shapes alone."""
    build: Callable[[Weights, Ops, torch.device, int, Callable[[], None]], Model]
    """The model of these weights, on a device, with pages of this size. Hears each layer as it is ready."""
    published: Callable[[Config], Published] | None = None
    """The checkpoint of this shape as it is published, where random ones can be written."""
