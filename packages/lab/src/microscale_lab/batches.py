"""Batches of a model's ``forward`` without an engine: token ids and pages in, tensors out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from microscale.models.batch import ForwardBatch, LogitRows
from microscale.models.config import PAGED, LayerKind
from microscale.planning.ops import AttentionBatch, StateBatch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SequenceChunk:
    """New tokens of one sequence in one step, and the pages that hold it."""

    token_ids: Sequence[int]
    first_position: int
    pages: Mapping[LayerKind, Sequence[int]]
    """Of layers with states one number, the slot; none where a model has no such layers."""
    num_logits: int
    """How many of its last tokens are to give logits."""

    @property
    def context_len(self) -> int:
        return self.first_position + len(self.token_ids)


def build_batch(chunks: Sequence[SequenceChunk], page_size: int, device: torch.device) -> ForwardBatch:
    """Lay the chunks end to end; rows of logits as the chunks want them, in their order."""
    lengths = [len(chunk.token_ids) for chunk in chunks]
    starts = [0, *accumulate(lengths)]
    spans = [torch.arange(c.first_position, c.context_len) for c in chunks]
    query_start = _int32(starts, device)
    context_lens = _int32([c.context_len for c in chunks], device)
    attention, slots = {}, {}
    for kind in PAGED:
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
        states=_states(chunks, query_start, context_lens, max(lengths, default=0), device),
    )


def _states(
    chunks: Sequence[SequenceChunk], query_start: Tensor, context_lens: Tensor, longest: int, device: torch.device
) -> StateBatch | None:
    if not all(LayerKind.LINEAR in chunk.pages for chunk in chunks):
        return None
    slots = _int32([chunk.pages[LayerKind.LINEAR][0] for chunk in chunks], device)
    return StateBatch(query_start, context_lens, slots, slots[:, None], longest)


def _logit_rows(
    chunks: Sequence[SequenceChunk],
    starts: Sequence[int],
    attention: Mapping[LayerKind, AttentionBatch],
    device: torch.device,
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
    padded = torch.zeros((len(tables), width), dtype=torch.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
