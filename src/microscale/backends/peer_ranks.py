"""Ranks whose small sums are one launch of ours through peer-mapped memory, and all others the library's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from microscale.backends.ranks import Absent, Ranks
from microscale.hardware.sums import PEER_ROW_BYTES, PEER_ROWS, most_rows
from microscale.kernels.launch import Kernel, Launch, recording
from microscale.kernels.op import Reason
from microscale.kernels.sums import one_shot
from microscale.kernels.sums.spec import PeerBuffers, SumSpec, buffer_bytes

if TYPE_CHECKING:
    from torch import Tensor

SUMMED_AT_ONCE = 2
"""Rows that a model may add up for one token: two parts of a layer together."""


class Library(Ranks, Protocol):
    """The ranks without our kernel: ``parallel/group.Group``."""

    def count(self) -> None:
        """A sum was begun that is not the library's."""


def peer_bytes(world: int) -> int:
    """Of the buffer that each rank has for the others."""
    return buffer_bytes(world)


class Mapped(Protocol):
    """Memory of all ranks: ``parallel/peers.Mapped``."""

    @property
    def buffers(self) -> tuple[Tensor, ...]: ...


class PeerRanks:
    """See ``Ranks``."""

    def __init__(self, library: Library, peers: PeerBuffers) -> None:
        self._library = library
        self._peers = peers
        self.world = peers.world
        self._memory: Mapped | None = None
        """Kept as long as somebody may write to it."""

    @classmethod
    def over(cls, library: Library, rank: int, memory: Mapped) -> PeerRanks:
        """``memory``: of all ranks, zeros, ``peer_bytes`` each, mapped to this rank's device."""
        epochs = torch.zeros(PEER_ROWS, dtype=torch.int32, device=memory.buffers[rank].device)
        made = cls(library, PeerBuffers(rank, memory.buffers, epochs))
        made._memory = memory
        return made

    def _takes(self, part: Tensor) -> bool:
        spec = SumSpec(part.numel() // part.shape[-1], part.shape[-1], part.dtype, self.world)
        return one_shot.refuses(spec) is None and spec.rows <= most_rows(self.world, spec.row_bytes)

    def sum(self, part: Tensor) -> Tensor:
        if not part.numel() or not self._takes(part):
            return self._library.sum(part)
        self._library.count()
        return one_shot.sum_rows(self._peers, part.reshape(-1, part.shape[-1])).view(part.shape)

    def fuses(self, part: Tensor) -> bool:
        return part.ndim == 2 and part.dtype is torch.bfloat16 and part.numel() > 0 and self._takes(part)

    def sum_add_norm(self, part: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        self._library.count()
        return one_shot.sum_add_norm(self._peers, part, residual, weight, epsilon)

    def uncapturable(self, tokens: int) -> Reason | None:
        few = tokens * SUMMED_AT_ONCE <= most_rows(self.world, PEER_ROW_BYTES)
        return None if few else self._library.uncapturable(tokens)


class _Nobody(Absent):
    """Stands for the library where sums are recorded."""

    def count(self) -> None: ...


def shape_ranks(world: int) -> PeerRanks:
    """Ranks without memory, for recording what they would start."""
    buffers = tuple(torch.empty(buffer_bytes(world), dtype=torch.uint8, device="meta") for _ in range(world))
    epochs = torch.empty(PEER_ROWS, dtype=torch.int32, device="meta")
    return PeerRanks(_Nobody(world), PeerBuffers(0, buffers, epochs))


def record_sums(hidden: int, world: int, draft_head: bool = True) -> dict[Kernel, Launch]:
    """Every kernel by which so many ranks add up rows of a model of this width, in bf16, and what their draft heads
    tell each other."""
    ranks = shape_ranks(world)
    part = torch.empty((1, hidden), dtype=torch.bfloat16, device="meta")
    with recording() as found:
        ranks.sum(part)
        if ranks.fuses(part):
            ranks.sum_add_norm(part, part, part[0], 1e-5)
        if draft_head:
            ranks.sum(torch.empty((1, 2 * world), dtype=torch.float32, device="meta"))
    return found
