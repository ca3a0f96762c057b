"""Where the rows of a draft head lie: positions, slots, lengths; and rows joined. Torch's own ops, between kernels.

Kernels are listed on tensors without memory (``meta``). There these make the shape of their answer and compute nothing:
for the first sum, product, ``arange`` or ``cat`` of such tensors torch imports its compiler, 900 modules, at every
start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from microscale.backends.ops import AttentionBatch
from microscale.models.batch import ForwardBatch
from microscale.models.config import LayerKind

if TYPE_CHECKING:
    from torch import Tensor

FULL = LayerKind.FULL


def count_up(size: int, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """0, 1 … ``size - 1``; int64 without ``dtype``."""
    dtype = dtype or torch.int64
    if device.type == "meta":
        return torch.empty(size, dtype=dtype, device=device)
    return torch.arange(size, dtype=dtype, device=device)


def join(first: Tensor, second: Tensor, dim: int = 0) -> Tensor:
    """Matrices or vectors of one type, one behind the other."""
    if first.is_meta:
        shape = list(first.shape)
        shape[dim] += second.shape[dim]
        return first.new_empty(shape)
    return torch.cat((first, second), dim)


def following(last: AttentionBatch, count: int) -> Tensor:
    """Positions ``[sequences, count]`` int64 of the tokens after the last rows."""
    lens = last.context_lens
    if lens.is_meta:
        return lens.new_empty((lens.shape[0], count), dtype=torch.int64)
    return lens.to(torch.int64)[:, None] + torch.arange(count, device=lens.device)


def slots_of(page_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Where positions ``[sequences, n]`` of the table's sequences are."""
    if positions.is_meta:
        return positions.new_empty(positions.shape)
    pages = page_table.to(torch.int64).gather(1, positions // page_size)
    return pages * page_size + positions % page_size


class Steps:
    """The decoding steps of a head that goes on by itself: one row of each sequence, then the next, and so on.

    All of them are laid out at once: a step has nothing to compute but the head itself.
    """

    def __init__(self, last: AttentionBatch, count: int, page_size: int) -> None:
        positions = following(last, count)
        sequences, device = positions.shape[0], positions.device
        self._table = last.page_table
        self._positions = positions.T.contiguous()  # [count, sequences]
        self._slots = slots_of(last.page_table, positions, page_size).T.contiguous()
        # A step's lengths begin at a multiple of 16 bytes: attention is compiled for that.
        lens = torch.empty((count, -(-sequences // 4) * 4), dtype=torch.int32, device=device)
        self._lens = lens[:, :sequences].copy_(self._positions).add_(1)
        self._starts = count_up(sequences + 1, device, torch.int32)

    def batch(self, step: int, token_ids: Tensor) -> ForwardBatch:
        """Step 0 is the row after the last one."""
        queries = AttentionBatch(self._starts, self._lens[step], self._table, 1)
        return ForwardBatch(token_ids, self._positions[step], {FULL: queries}, {FULL: self._slots[step]}, None)
