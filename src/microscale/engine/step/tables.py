"""Page tables on the device that stay where they are: row r belongs to the r-th sequence of a step.

A step copies only the entries that were not there before, all of them at once (``flush``): their places and their pages
in one copy, which one kernel lays out. Entries that later steps may not change are remembered as shown: the pages up to
the one of the sequence's own next token. Those of drafts are shown again if they are others, since they may have gone
back to the pool and come to another sequence meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from microscale.backends.following import Pages
from microscale.engine.request import Request
from microscale.engine.step.pages import NOWHERE, PagePool
from microscale.engine.step.work import Work
from microscale.models.config import LayerKind

if TYPE_CHECKING:
    from torch import Tensor

STAGED = 2048
"""Entries that fit into the standing buffers; more are copied from memory of their own."""


class _Row:
    """What the device's page table holds in one row."""

    __slots__ = ("num_pages", "owner", "preempted", "shown")

    def __init__(self) -> None:
        self.owner: Request | None = None
        self.preempted = 0
        """How often the owner was preempted: each time it comes back it has other pages."""
        self.num_pages = 0
        """That stay."""
        self.shown: Sequence[int] = ()
        """Those behind them."""


class PageTables:
    """The tables of up to ``rows`` sequences, one for each kind of layer."""

    def __init__(
        self, pools: Mapping[LayerKind, PagePool], page_size: int, rows: int, max_pages: int, device: torch.device
    ) -> None:
        self._pools = pools
        self.page_size = page_size
        self.num_rows = rows
        self.max_pages = max_pages
        # Every table begins at a multiple of 16 bytes: kernels are compiled for that.
        each = -(-rows * max_pages // 4) * 4
        self._flat = torch.zeros(len(LayerKind) * each, dtype=torch.int32, device=device)
        self._starts = {kind: at * each for at, kind in enumerate(LayerKind)}
        self._tables = {
            kind: self._flat[start : start + rows * max_pages].view(rows, max_pages)
            for kind, start in self._starts.items()
        }
        self._rows = {kind: [_Row() for _ in range(rows)] for kind in LayerKind}
        self._places: list[int] = []
        self._pages: list[int] = []
        """What ``flush`` is to copy: places in ``_flat``, and the pages there."""
        # They take turns: a step is filled while the one before may still stand in the queue.
        self._staged = [_Staged(STAGED, device), _Staged(STAGED, device)]

    def of(self, kind: LayerKind, rows: int, pages: int) -> Tensor:
        """The first rows and pages: the same tensor at every call."""
        return self._tables[kind][:rows, :pages]

    def pages(self, kinds: Sequence[LayerKind]) -> Pages:
        """Those of some kinds, for who looks positions up on the device."""
        return Pages(self._flat, tuple(self._starts[kind] for kind in kinds), self.max_pages, self.page_size)

    def show(self, kind: LayerKind, row: int, work: Work) -> Sequence[int]:
        """Bring a row up to date, with the next ``flush``. Gives the sequence's pages."""
        request, pages = work.request, self._pools[kind].pages_of(work.request.request_id)
        held, stay = self._rows[kind][row], work.first // self.page_size + 1
        known = held.num_pages if held.owner is request and held.preempted == request.num_preempted else 0
        if known < len(pages):
            fresh = pages[known:]
            if known and held.shown[: len(fresh)] == fresh:
                return pages
            self._note(kind, row, known, fresh)
            held.owner, held.preempted = request, request.num_preempted
            held.num_pages = min(stay, len(pages))
            held.shown = pages[held.num_pages :]
        return pages

    def show_nobody(self, kind: LayerKind, row: int, num_pages: int = 1) -> None:
        """Let a row look at the page that is nobody's, the one after the pool's last."""
        held = self._rows[kind][row]
        if held.owner is not None or held.num_pages < num_pages:
            self._note(kind, row, 0, [self._pools[kind].num_pages] * num_pages)
            held.owner, held.num_pages, held.shown = None, num_pages, ()

    def _note(self, kind: LayerKind, row: int, known: int, fresh: Sequence[int]) -> None:
        """Places that a window has left keep what they held: nobody looks."""
        begin = self._starts[kind] + row * self.max_pages + known
        self._places += range(begin, begin + len(fresh))
        self._pages += [0 if page == NOWHERE else page for page in fresh]

    def flush(self) -> None:
        """Begin to copy what is new."""
        count = len(self._places)
        if not count:
            return
        self._staged.reverse()
        staged = self._staged[0] if count <= STAGED else _Staged(count, self._flat.device)
        self._flat.index_copy_(0, *staged.copy(self._places, self._pages))
        self._places, self._pages = [], []


class _Staged:
    """Places (int64) and pages (int32) of up to ``most`` entries, on the host, pinned, and on the device."""

    def __init__(self, most: int, device: torch.device) -> None:
        pin = device.type == "cuda"
        self._host = torch.zeros(most + -(-most // 2), dtype=torch.int64, pin_memory=pin)
        self._there = torch.zeros_like(self._host, device=device) if pin else self._host
        self._copied = torch.cuda.Event() if pin else None
        self._words, self._halves = self._host.numpy(), self._host.view(torch.int32).numpy()

    def copy(self, places: Sequence[int], pages: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The same on the device, when its turn comes. It waits for the copy before."""
        count = len(places)
        if self._copied is not None:
            self._copied.synchronize()
        self._words[:count] = places
        self._halves[2 * count : 3 * count] = pages
        if self._copied is not None:
            words = count + -(-count // 2)
            self._there[:words].copy_(self._host[:words], non_blocking=True)
            self._copied.record()
        return self._there[:count], self._there.view(torch.int32)[2 * count : 3 * count]
