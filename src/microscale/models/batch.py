"""What one step of a model takes: the tokens, where they are, and the KV cache.

Layers of one kind (full, sliding) share page tables; the two kinds may use pages of their own. All index tensors live
on the model's device, so that a kernel reads lengths and tables there and a captured graph sees new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from microscale.models.config import LayerKind
from microscale.planning.ops import AttentionBatch, PagedKv

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


@dataclass(frozen=True)
class KvCache:
    """Paged keys and values of every layer."""

    layers: tuple[PagedKv, ...]
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
    ) -> KvCache:
        """Pages for each layer by its kind; a head shape is (kv_heads, head_dim), uint8 means E4M3.

        The memory is not cleared: attention reads no position that was not written.
        """
        layers = []
        for kind in kinds:
            kv_heads, head_dim = head_shapes[kind]
            shape = (num_pages[kind], kv_heads, page_size, head_dim)
            k, v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
            # E4M3 codes: scale 1 for every head, so keys and values saturate at 448.
            ones = torch.ones(kv_heads, dtype=torch.float32, device=device) if dtype == torch.uint8 else None
            layers.append(PagedKv(k, v, ones, ones))
        return cls(tuple(layers), page_size)
