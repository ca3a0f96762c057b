"""What one step of a model takes: the tokens, where they are, and the KV cache.

Layers of one kind (full, sliding) share page tables; the two kinds may use pages of their own. All index tensors live
on the model's device, so that a kernel reads lengths and tables there and a captured graph sees new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from microscale.models.config import LayerKind
from microscale.planning.ops import AttentionBatch, PagedKv, RecurrentSpec, StateBatch, StateCache

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LogitRows:
    """The tokens whose logits are wanted, where these are not all: for each sequence none or its last ones.

    The last layer gives keys and values of every token, and everything else for these alone.
    """

    rows: Tensor  # [rows] int64
    attention: Mapping[LayerKind, AttentionBatch]
    """These tokens as queries of their sequences; sequences without any are not in it."""


@dataclass(frozen=True)
class ForwardBatch:
    """New tokens of one or more sequences, laid end to end."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    attention: Mapping[LayerKind, AttentionBatch]
    slots: Mapping[LayerKind, Tensor]
    """Where each token's keys and values go: ``[tokens]`` int64, page * page_size + offset."""
    logits: LogitRows | None
    """``None``: those of all tokens, and nothing is picked out, which would be launches of their own in every decoding
    step."""
    states: StateBatch | None = None
    """Where the states of the sequences are, for a model that has such layers."""


KvScales: TypeAlias = tuple[float, float]
"""What the E4M3 codes of a layer's keys and of its values are multiplied by."""


@dataclass(frozen=True)
class KvCache:
    """What every layer keeps: keys and values in pages, or states in slots."""

    layers: tuple[Any, ...]
    """Of each a ``PagedKv``, or of layers with states a ``StateCache``."""
    page_size: int

    @classmethod
    def allocate(
        cls,
        kinds: Sequence[LayerKind],
        num_pages: Mapping[LayerKind, int],
        page_size: int,
        head_shapes: Mapping[LayerKind, tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[KvScales] = (),
        states: RecurrentSpec | None = None,
    ) -> KvCache:
        """Pages for each layer by its kind; a head shape is (kv_heads, head_dim), uint8 means E4M3. ``scales``: of the
        codes of each layer; none: 1, so that keys and values saturate at 448. ``states``: of layers
        with states.

        The memory is not cleared: nothing is read that was not written.
        """
        layers: list[PagedKv | StateCache] = []
        for layer_idx, kind in enumerate(kinds):
            if kind is LayerKind.LINEAR:
                assert states is not None
                layers.append(StateCache.allocate(states, num_pages[kind], device))
                continue
            kv_heads, head_dim = head_shapes[kind]
            shape = (num_pages[kind], kv_heads, page_size, head_dim)
            k, v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
            if dtype == torch.uint8:
                of_k, of_v = scales[layer_idx] if scales else (1.0, 1.0)
                layers.append(PagedKv(k, v, *(torch.full((kv_heads,), scale, device=device) for scale in (of_k, of_v))))
            else:
                layers.append(PagedKv(k, v))
        return cls(tuple(layers), page_size)
