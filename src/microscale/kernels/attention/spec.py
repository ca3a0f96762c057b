"""The contract of ``attention``: causal softmax attention of new tokens over a paged KV cache.

The new tokens' keys and values are already in the cache. A query at position p sees the positions from
``max(0, p - window + 1)`` to p (from 0 without a window); nothing outside is read, so pages that the window has left
may hold anything. A sink is one learned logit per query head that takes part in the softmax and has no value.

Layers "with K = V" (Gemma 4's full ones) share the projection and not the cache: the key is its weighted norm, rotated,
the value its plain norm, so both are written (``small.rope_and_write_kv``) and both are read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from microscale.kernels.op import Activations

if TYPE_CHECKING:
    from torch import Tensor

HeadsKind = tuple[bool, bool, bool]
"""Whether queries and keys are normed, whether values are, and whether K = V."""


@dataclass(frozen=True)
class BatchShape:
    """What the host knows of a batch before attention runs."""

    sequences: int
    longest_query: int
    """The most new tokens of any sequence."""
    table_pages: int
    """Width of the page table."""
    kv_fp8: bool = False
    """Whether keys and values are E4M3 codes."""
    heads: HeadsKind | None = None
    """Where queries and keys come straight from the projection."""
    verify: bool = False
    """Every sequence decodes, with drafts or without: see ``AttentionBatch``."""

    @classmethod
    def of(cls, kv: PagedKv, batch: AttentionBatch, heads: HeadsKind | None = None) -> BatchShape:
        return cls(*batch.sizes, kv.k.dtype == torch.uint8, heads, batch.verify)


@dataclass(frozen=True)
class AttentionSpec:
    """One attention layer and the work that it is asked to do."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    sinks: bool
    page_size: int
    activations: Activations
    tokens: int
    """New tokens, over all sequences."""
    context: int
    """Cached positions per sequence that a query may see."""
    scale: float | None = None
    """The factor on the scores; without one, ``head_dim ** -0.5``. Gemma 4 norms its queries and has 1."""
    batch: BatchShape | None = None
    """The batch that is to run; ``None`` where no batch is known: each token is a sequence that decodes."""

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def shape(self) -> BatchShape:
        """The batch, or ``tokens`` sequences that decode at the full context."""
        return self.batch or BatchShape(self.tokens, 1, -(-self.context // self.page_size))


@dataclass(frozen=True)
class PagedKv:
    """The cache of one layer."""

    k: Tensor  # [pages, kv_heads, page_size, head_dim]: bf16 or float32, or u8 that is E4M3
    v: Tensor  # [pages, kv_heads, page_size, head_dim]
    k_scale: Tensor | None = None  # [kv_heads] or [1] float32, with E4M3: a key is its code times the scale of its head
    v_scale: Tensor | None = None  # like k_scale

    @property
    def page_size(self) -> int:
        return self.k.shape[2]


@dataclass(frozen=True)
class AttentionBatch:
    """Which new tokens belong to which sequence, and where their pages are. Read on the device by the kernels."""

    query_start: Tensor  # [sequences + 1] int32: new tokens of sequence s are query_start[s] to query_start[s + 1]
    context_lens: Tensor  # [sequences] int32: positions of s in the cache, the new tokens included
    page_table: Tensor  # [sequences, max_pages] int32: page of position p is page_table[s, p // page_size]
    max_query_len: int
    """The most new tokens of any sequence, known to the host: 1 where all sequences decode."""
    verify: bool = False
    """The new tokens are each sequence's next one and drafts after it: few, and the context may be long. Without it two
    or more new tokens are taken for a prompt's."""

    def __post_init__(self) -> None:
        # Kernels read both one after the other, whatever the strides say.
        assert self.query_start.is_contiguous()
        assert self.context_lens.is_contiguous()

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Sequences, the most new tokens of one, and the width of the page table: read once for all layers."""
        return self.context_lens.shape[0], self.max_query_len, self.page_table.shape[1]
