"""Page tables at fixed places on the device: row r belongs to the r-th sequence of a step.

The host keeps a copy of every table. A step writes the entries that differ from it, all of them with one copy and one
kernel (``flush``). Entries that no later step changes are not compared again: the pages up to the one that holds the
sequence's last token. Pages behind it hold drafts, and may go back to the pool and to another sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from microscale.engine.pages import NOWHERE, PagePool
from microscale.engine.request import Request
from microscale.engine.work import Work
from microscale.models.config import LayerKind
from microscale.planning.following import Pages

if TYPE_CHECKING:
    from torch import Tensor

STAGED = 2048
"""Entries that fit into the permanent buffer. More are copied from a buffer made for the occasion."""


class Staging:
    """A buffer of int64 words on the host, pinned, and its copy on the device. On a CPU the two are one."""

    def __init__(self, words: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.host = torch.zeros(words, dtype=torch.int64, pin_memory=pinned)
        self.on_device = self.host if device.type == "cpu" else torch.zeros_like(self.host, device=device)
        self._copied = torch.cuda.Event() if pinned else None

    def wait(self) -> None:
        """Wait until the last copy is made: then the host may write again."""
        if self._copied is not None:
            self._copied.synchronize()

    def send(self, first: int, end: int) -> None:
        """Begin to copy these words."""
        if self._copied is not None:
            self.on_device[first:end].copy_(self.host[first:end], non_blocking=True)
            self._copied.record()


class _TableRow:
    """Whose pages a row holds."""

    __slots__ = ("num_pages", "owner", "preempted", "room")

    def __init__(self) -> None:
        self.owner: Request | None = None
        self.preempted = 0
        """How often the owner had been preempted: it comes back with other pages."""
        self.num_pages = 0
        """Entries that no later step changes."""
        self.room = 0
        """Tokens that they hold."""


class PageTables:
    """The tables of up to ``rows`` sequences, one for each kind of layer that ``pools`` names."""

    def __init__(
        self, pools: Mapping[LayerKind, PagePool], page_size: int, rows: int, max_pages: int, device: torch.device
    ) -> None:
        self._pools = pools
        self.page_size = page_size
        self.num_rows = rows
        self.max_pages = max_pages
        # Every table begins at a multiple of 16 bytes: kernels are compiled for that.
        size = -(-rows * max_pages // 4) * 4
        self._flat = torch.zeros(len(pools) * size, dtype=torch.int32, device=device)
        self._starts = {kind: place * size for place, kind in enumerate(pools)}
        self._tables = {
            kind: self._flat[start : start + rows * max_pages].view(rows, max_pages)
            for kind, start in self._starts.items()
        }
        self.host = {kind: np.zeros((rows, max_pages), dtype=np.int32) for kind in pools}
        """The same tables, with what ``flush`` has yet to copy."""
        self._rows = [_TableRow() for _ in range(rows)]
        self._changed: list[tuple[Any, Any]] = []
        """Places in ``_flat``, and the pages to write there."""
        self._staging = Staging(STAGED + -(-STAGED // 2), device)

    def of(self, kind: LayerKind, rows: int, pages: int) -> Tensor:
        """The first rows and pages: the same tensor at every call."""
        return self._tables[kind][:rows, :pages]

    def pages(self) -> Pages:
        """All tables, for kernels that look positions up."""
        return Pages(self._flat, tuple(self._starts.values()), self.max_pages, self.page_size)

    def show(self, row: int, work: Work) -> None:
        """Bring a row up to date, with the next ``flush``."""
        request, held = work.request, self._rows[row]
        known = 0
        if held.owner is request and held.preempted == request.num_preempted:
            if work.first + work.slack + work.count <= held.room:
                return
            known = held.num_pages
        last_own = work.first + work.count - len(work.drafts) - 1
        for kind, pool in self._pools.items():
            pages = pool.pages_of(request.request_id)
            self._write(kind, row, known, pages[known:])
        held.owner, held.preempted = request, request.num_preempted
        held.num_pages = min(last_own // self.page_size + 1, len(pages))
        held.room = held.num_pages * self.page_size

    def show_padding(self, row: int, num_pages: int = 1) -> None:
        """Let a row look at the scratch page, the one after the pool's last."""
        held = self._rows[row]
        if held.owner is not None or held.num_pages < num_pages:
            for kind, pool in self._pools.items():
                self._write(kind, row, 0, [pool.num_pages] * num_pages)
            held.owner, held.num_pages, held.room = None, num_pages, 0

    def _write(self, kind: LayerKind, row: int, first: int, pages: Sequence[int]) -> None:
        """Note the entries that change. Those of pages that a window has left stay as they are: nothing reads them."""
        entries = self.host[kind][row, first : first + len(pages)]
        wanted = np.array(pages, dtype=np.int32)
        changed = np.flatnonzero((entries != wanted) & (wanted != NOWHERE))
        if len(changed):
            entries[changed] = wanted[changed]
            self._changed.append((changed + (self._starts[kind] + row * self.max_pages + first), wanted[changed]))

    def flush(self) -> None:
        """Begin to copy what has changed."""
        if not self._changed:
            return
        places, pages = (np.concatenate(parts) for parts in zip(*self._changed, strict=True))
        self._changed = []
        count = len(places)
        words = count + -(-count // 2)
        staging = self._staging if count <= STAGED else Staging(words, self._flat.device)
        staging.wait()
        staging.host.numpy()[:count] = places
        staging.host.view(torch.int32).numpy()[2 * count : 3 * count] = pages
        staging.send(0, words)
        on_device = staging.on_device
        self._flat.index_copy_(0, on_device[:count], on_device.view(torch.int32)[2 * count : 3 * count])
