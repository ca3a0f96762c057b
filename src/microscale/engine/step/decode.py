"""Decoding steps from tensors that stay where they are, so that a CUDA graph can be captured once and replayed.

Row r of the tensors is the r-th sequence of the schedule. A step changes only what is new: token, position, length and
slot of each row (one small copy to the device), and those entries of the page tables that were not there before. Rows
that fill a batch up to the size of a graph look at one token in a page that belongs to nobody.

Copies come from pinned memory, and nobody waits for them. A step is filled while the one before it may still stand in
the queue with its copies unread, so they take turns between two buffers: the one before that is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from microscale.backends.ops import AttentionBatch, Logits
from microscale.engine.step.graphs import graph_size, table_width
from microscale.engine.step.pages import PagePool
from microscale.engine.step.tables import PageTables
from microscale.engine.step.work import Work
from microscale.models.batch import ForwardBatch
from microscale.models.config import LayerKind

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GraphKey:
    """What a captured step depends on."""

    rows: int
    pages: int
    """Of a sequence, at most."""

    def fits(self, other: GraphKey) -> bool:
        """Whether such a step can run in the graph of another."""
        return self.rows <= other.rows and self.pages <= other.pages

    @property
    def cost(self) -> tuple[int, ...]:
        """Orders graphs that a step fits into. Wide tables come last: other kernels run there."""
        return self.pages, self.rows


LINES = 3 + len(LayerKind)
"""Of the standing inputs: tokens, positions, slots of each kind; lengths."""


def _lines(flat: Tensor, size: int) -> Tensor:
    """``[LINES, size]`` at the beginning of a buffer, in one piece: a copy of it needs no other."""
    return flat[: LINES * size].view(LINES, size)


def _lengths(lines: Tensor) -> Tensor:
    """int32 ``[size]``: half of the last line."""
    return lines[-1].view(torch.int32)[: lines.shape[1]]


class DecodeInputs:
    """The tensors of up to ``max_rows`` sequences that decode together."""

    def __init__(
        self,
        pools: Mapping[LayerKind, PagePool],
        page_size: int,
        max_rows: int,
        max_pages: int,
        device: torch.device,
        spare_rows: int = 0,
    ) -> None:
        """``spare_rows``: of the page tables, beyond those that are needed here."""
        self._pools = pools
        self._page_size = page_size
        rows = graph_size(max_rows)
        pin = device.type == "cuda"
        # On the device: the lines; page tables.
        self._wide = torch.zeros(LINES * rows, dtype=torch.int64, device=device)
        self.tables = PageTables(pools, page_size, rows + spare_rows, max_pages, device)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        # On the host, from where they are copied.
        self._host = [torch.zeros(self._wide.shape, dtype=torch.int64, pin_memory=pin) for _ in range(2)]
        self._max_pages = max_pages
        self._batches: dict[GraphKey, ForwardBatch] = {}

    def key(self, schedule: Sequence[Work]) -> GraphKey:
        """The graph that the schedule's sequences run in: the smallest of two widths that holds the longest of them."""
        longest = max(work.first for work in schedule) + 1
        return GraphKey(graph_size(len(schedule)), table_width(longest, self._page_size, self._max_pages))

    def batch(self, key: GraphKey) -> ForwardBatch:
        """The first rows and pages, as a step of the model takes them. The tensors are the same at every call."""
        if key not in self._batches:
            self._batches[key] = self._make_batch(key)
        return self._batches[key]

    def _make_batch(self, key: GraphKey) -> ForwardBatch:
        kinds = list(LayerKind)
        size = key.rows
        lines = _lines(self._wide, size)
        tokens, positions, *slots = lines[:-1]
        attention = {
            kind: AttentionBatch(self._starts[: size + 1], _lengths(lines), self.tables.of(kind, size, key.pages), 1)
            for kind in kinds
        }
        return ForwardBatch(tokens, positions, attention, dict(zip(kinds, slots, strict=True)), None)

    def fill(self, schedule: Sequence[Work], size: int, tokens: Tensor | None = None) -> None:
        """Row by row what the schedule says, then rows of no one up to ``size``. ``tokens``: not on the host yet."""
        spare = size - len(schedule)
        firsts = [work.first for work in schedule]
        known = [work.request.tokens[work.first] for work in schedule] if tokens is None else [0] * len(schedule)
        wide = [known + [0] * spare, firsts + [0] * spare]
        for kind, pool in self._pools.items():
            slots = []
            for row, work in enumerate(schedule):
                pages = self.tables.show(kind, row, work)
                slots.append(pages[work.first // self._page_size] * self._page_size + work.first % self._page_size)
            # The page after the last is nobody's.
            wide.append(slots + [pool.num_pages * self._page_size] * spare)
            for row in range(len(schedule), size):
                self.tables.show_nobody(kind, row)
        self.tables.flush()
        self._host.reverse()
        host, there = _lines(self._host[0], size), _lines(self._wide, size)
        host[:-1].copy_(torch.tensor(wide))
        _lengths(host).copy_(torch.tensor([first + 1 for first in firsts] + [1] * spare))
        there.copy_(host, non_blocking=True)
        if tokens is not None:
            there[0, : len(schedule)].copy_(tokens)


def take_rows(logits: Logits, rows: slice | list[int]) -> Logits:
    """The logits of some rows."""
    return Logits(
        logits.values[rows],
        logits.block_max[rows],
        logits.block_argmax[rows],
        logits.block_sum[rows],
        logits.block_rows,
    )
