"""Page tables on the device that stay where they are: row r belongs to the r-th sequence of a step.

A step copies only the entries that were not there before. Entries that later steps may not change are remembered as
shown: the pages up to the one of the sequence's own next token. Those of drafts are shown again, since they may have
gone back to the pool and come to another sequence meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from microscale.engine.request import Request
from microscale.engine.step.pages import NOWHERE, PagePool
from microscale.engine.step.work import Work
from microscale.models.config import LayerKind


@dataclass
class _Row:
    """What the device's page table holds in one row."""

    owner: tuple[Request, int] | None = None
    """The request, and how often it was preempted: each time it comes back it has other pages."""
    num_pages: int = 0


class PageTables:
    """The tables of up to ``rows`` sequences, one for each kind of layer."""

    def __init__(
        self, pools: Mapping[LayerKind, PagePool], page_size: int, rows: int, max_pages: int, device: torch.device
    ) -> None:
        self._pools = pools
        self.page_size = page_size
        self.num_rows = rows
        self.max_pages = max_pages
        pin = device.type == "cuda"
        self._tables = {kind: torch.zeros((rows, max_pages), dtype=torch.int32, device=device) for kind in LayerKind}
        # On the host, from where they are copied.
        self._host = {kind: torch.zeros(t.shape, dtype=t.dtype, pin_memory=pin) for kind, t in self._tables.items()}
        self._rows = {kind: [_Row() for _ in range(rows)] for kind in LayerKind}

    def of(self, kind: LayerKind, rows: int, pages: int) -> Tensor:
        """The first rows and pages: the same tensor at every call."""
        return self._tables[kind][:rows, :pages]

    def show(self, kind: LayerKind, row: int, work: Work) -> Sequence[int]:
        """Bring a row up to date. Gives the sequence's pages."""
        pages = self._pools[kind].pages_of(work.request.request_id)
        self._show(kind, row, (work.request, work.request.num_preempted), pages, work.first // self.page_size + 1)
        return pages

    def show_nobody(self, kind: LayerKind, row: int, num_pages: int = 1) -> None:
        """Let a row look at the page that is nobody's, the one after the pool's last."""
        self._show(kind, row, None, [self._pools[kind].num_pages] * num_pages, num_pages)

    def _show(
        self, kind: LayerKind, row: int, owner: tuple[Request, int] | None, pages: Sequence[int], stay: int
    ) -> None:
        """Places that a window has left keep what they held: nobody looks. ``stay``: pages that will not change."""
        held = self._rows[kind][row]
        known = held.num_pages if held.owner == owner else 0
        if known < len(pages):
            fresh = [0 if page == NOWHERE else page for page in pages[known:]]
            # Of this there is one: a row changes hands only after everything that was launched has been read.
            host = self._host[kind][row, known : len(pages)]
            host.copy_(torch.tensor(fresh, dtype=torch.int32))
            self._tables[kind][row, known : len(pages)].copy_(host, non_blocking=True)
            self._rows[kind][row] = _Row(owner, min(stay, len(pages)))
