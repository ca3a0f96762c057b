"""What one step of a model takes: the tokens, where they are, and the KV cache.

Layers of one kind (full, sliding) share page tables; the two kinds may use pages of their own. All index tensors live
on the model's device, so that a kernel reads lengths and tables there and a captured graph sees new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
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


@dataclass(frozen=True)
class Chunk:
    """New tokens of one sequence in one step, and the pages that hold it."""

    token_ids: Sequence[int]
    first_position: int
    pages: Mapping[LayerKind, Sequence[int]]
    num_logits: int
    """How many of its last tokens are to give logits."""

    @property
    def context_len(self) -> int:
        return self.first_position + len(self.token_ids)


def build_batch(chunks: Sequence[Chunk], page_size: int, device: torch.device) -> ForwardBatch:
    """Lay the chunks end to end; rows of logits as the chunks want them, in their order.

    The GPU has nothing to do meanwhile, and a prompt has thousands of tokens: no loop over them.
    """
    lengths = [len(chunk.token_ids) for chunk in chunks]
    starts = [0, *accumulate(lengths)]
    spans = [torch.arange(c.first_position, c.context_len) for c in chunks]
    query_start = _int32(starts, device)
    context_lens = _int32([c.context_len for c in chunks], device)
    attention, slots = {}, {}
    for kind in LayerKind:
        tables = [torch.tensor(chunk.pages[kind], dtype=torch.int64) for chunk in chunks]
        placed = [
            table[span // page_size] * page_size + span % page_size for table, span in zip(tables, spans, strict=True)
        ]
        page_table = _padded(tables).to(device, torch.int32)
        attention[kind] = AttentionBatch(query_start, context_lens, page_table, max(lengths, default=0))
        slots[kind] = _joined(placed).to(device)
    return ForwardBatch(
        token_ids=_joined([torch.tensor(chunk.token_ids, dtype=torch.int64) for chunk in chunks]).to(device),
        positions=_joined(spans).to(device),
        attention=attention,
        slots=slots,
        logits=_logit_rows(chunks, starts, attention, device),
    )


def _logit_rows(
    chunks: Sequence[Chunk], starts: Sequence[int], attention: Mapping[LayerKind, AttentionBatch], device: torch.device
) -> LogitRows | None:
    counts = [chunk.num_logits for chunk in chunks]
    if counts == [len(chunk.token_ids) for chunk in chunks]:
        return None
    some = [count for count in counts if count]
    query_start = _int32([0, *accumulate(some)], device)
    chosen: Tensor | slice = slice(None)
    if len(some) < len(chunks):
        chosen = torch.tensor([i for i, count in enumerate(counts) if count], dtype=torch.int64).to(device)

    def of_chosen(whole: AttentionBatch) -> AttentionBatch:
        lens, table = whole.context_lens[chosen], whole.page_table[chosen]
        return AttentionBatch(query_start, lens, table, max(some, default=0))

    rows = _joined([torch.arange(end - count, end) for end, count in zip(starts[1:], counts, strict=True)])
    return LogitRows(rows.to(device), {kind: of_chosen(whole) for kind, whole in attention.items()})


def _int32(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _padded(tables: Sequence[Tensor]) -> Tensor:
    """One row for each, filled up with zeros."""
    width = max((len(table) for table in tables), default=0)
    found = torch.zeros((len(tables), width), dtype=torch.int64)
    for row, table in zip(found, tables, strict=True):
        row[: len(table)] = table
    return found
