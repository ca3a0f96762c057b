"""The contract of sums over ranks: memory that every rank maps, how it is laid out, and the protocol over it.

Every rank has a buffer that all others write into. A row of a tensor has a *channel* of it, used by one program:

    flags   [rows][8 senders] int32            how often the sender has used the channel
    data    [rows][2 halves][senders][bytes]   what it sent, by turns in one half and the other

Use e of a channel, on every rank:

    1. write the row to half e % 2 of all ranks, in the slot of this sender
    2. set this sender's flag to e on all ranks           (release: the row is there before the flag)
    3. wait until all senders' flags here are e or more   (acquire: then their rows are here)
    4. add up the slots of half e % 2 in the order of the ranks

Nobody overtakes: who writes half e % 2 again, in use e + 2, has seen every flag at e + 1, and a rank sets that in a
launch that began after its launch of use e had ended, with all that it read. A rank is ahead by one use at most, so
flags are compared by their difference, which may wrap.

How often this rank has used a channel stands in memory of its own (``epochs``), on the device: a captured graph goes on
counting. All ranks must start the same sums in the same order, each on one stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from microscale.hardware.sums import PEER_ROW_BYTES, PEER_ROWS, PEER_WORLDS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SENDERS = max(PEER_WORLDS)
FLAG_BYTES = 4
DATA_AT = PEER_ROWS * SENDERS * FLAG_BYTES


def buffer_bytes(world: int) -> int:
    """Of one rank's buffer."""
    return DATA_AT + 2 * PEER_ROWS * world * PEER_ROW_BYTES


@dataclass(frozen=True)
class SumSpec:
    """One sum."""

    rows: int
    width: int
    dtype: torch.dtype
    world: int

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize


@dataclass(frozen=True)
class PeerBuffers:
    """What one rank has of all buffers."""

    rank: int
    buffers: tuple[Tensor, ...]  # of each rank, its own among them: [buffer_bytes(world)] uint8, mapped to this device
    epochs: Tensor  # [PEER_ROWS] int32, its own: how often each channel was used

    @property
    def world(self) -> int:
        return len(self.buffers)
