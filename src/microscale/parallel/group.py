"""The ranks of one model: sums and gathers over ``torch.distributed``, NCCL where each rank has a GPU of its own, gloo
elsewhere.

A group belongs to who made it: nothing is global. It counts what it was asked for and knows since when it waits for the
others, so that a rank that lags behind can be named. It has no useful timeout of its own: who watches the ranks'
processes ends a wait by ending these.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, TCPStore

from microscale.errors import RankFailed, Unsupported
from microscale.parallel.sharding import Shard
from microscale.parallel.transport import Transport

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store

LAST_RESORT = timedelta(hours=12)
"""The library's own timeout. Whoever leads the ranks notices within seconds what is wrong."""
LOOPBACK = "127.0.0.1"
MEETING_S = timedelta(seconds=120)
"""In which all ranks, which were there a moment ago, come to where they meet."""


@dataclass(frozen=True)
class Meeting:
    """Where ranks find each other."""

    store: Store
    transport: Transport
    address: str = LOOPBACK
    """Of this rank's own network interface, for gloo."""


def meet_at(file: str, world: int, transport: Transport) -> Meeting:
    """Ranks of one machine find each other through a file."""
    return Meeting(FileStore(file, world), transport)


def meet_over(address: str, port: int, shard: Shard, transport: Transport, own: str) -> Meeting:
    """Ranks of several machines find each other at rank 0's ``port``. ``own``: this rank's address, for gloo."""
    store = TCPStore(address, port, shard.world, False, MEETING_S)
    return Meeting(store, transport, own)


def open_store(server: socket.socket, address: str, world: int) -> Store:
    """Rank 0's side of it, at a socket that listens."""
    port = server.getsockname()[1]
    return TCPStore(address, port, world, True, MEETING_S, False, False, server.detach())


class Group:
    """One rank's end. All ranks call the same methods in the same order."""

    def __init__(self, shard: Shard, meeting: Meeting, device: torch.device) -> None:
        """Returns when all ranks are there."""
        self.shard = shard
        self.transport = meeting.transport
        self.store = meeting.store
        self._device = device
        self.calls = 0
        """Sums and gathers that were begun."""
        self.waits_since: float | None = None
        """``time.monotonic()`` when the present one began."""
        self._group = _join(shard, meeting, device)
        # Whatever is set up lazily is set up now: not in the first request, nor while a graph is captured.
        self.sum(torch.zeros(1, device=device))

    @property
    def world(self) -> int:
        return self.shard.world

    def uncapturable(self, tokens: int) -> str | None:
        """Why no CUDA graph can hold its sums, of whatever size."""
        return None if self.transport is Transport.NCCL else "gloo adds up in the host's memory"

    def count(self) -> None:
        """A sum was begun that goes another way."""
        self.calls += 1

    def fuses(self, part: Tensor) -> bool:
        """Whether a sum is one launch with what follows it: not here."""
        return False

    def sum_add_norm(self, part: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        raise Unsupported("The library's sums are launches of their own; ask fuses first.")

    def sum(self, part: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each. Added up in float32: of two numbers in bf16 that is the same
        as one addition, of more it is not."""
        if part.is_meta:
            return part
        whole = self._carried(part)
        if self.world > 2 or self.transport is Transport.GLOO:
            whole = whole.float()
        with self._waiting():
            self._group.allreduce([whole]).wait()
        return whole.to(part)

    def columns(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """What the ranks hold of a matrix, of which each has so many columns, put together on the first of them."""
        sent = self._carried(torch.nn.functional.pad(part, (0, max(widths) - part.shape[1])))
        into = [torch.empty_like(sent) for _ in widths] if self.shard.is_first else []
        options = dist.GatherOptions()
        options.rootRank = 0
        with self._waiting():
            self._group.gather([into] if into else [], [sent], options).wait()
        if not into:
            return None
        return torch.cat([each[:, :width] for each, width in zip(into, widths, strict=True)], dim=1).to(part)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The first rank's numbers, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        sent = self._carried(tensor)
        with self._waiting():
            self._group.broadcast([sent], options).wait()
        return sent if sent is tensor else tensor.copy_(sent)

    def _carried(self, tensor: Tensor) -> Tensor:
        """As the transport takes it: gloo knows the host's memory alone."""
        tensor = tensor.contiguous()
        return tensor.cpu() if self.transport is Transport.GLOO else tensor

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.calls += 1
        self.waits_since = time.monotonic()
        try:
            yield
        except RuntimeError as error:  # the library's word for a peer that is gone
            raise RankFailed(f"Rank {self.shard.rank} lost another rank: {error}") from error
        finally:
            self.waits_since = None


def _join(shard: Shard, meeting: Meeting, device: torch.device) -> Any:
    if meeting.transport is Transport.NCCL:
        torch.cuda.set_device(device)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = LAST_RESORT
        return dist.ProcessGroupNCCL(meeting.store, shard.rank, shard.world, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.address)]
    gloo._timeout = LAST_RESORT
    return dist.ProcessGroupGloo(meeting.store, shard.rank, shard.world, gloo)
