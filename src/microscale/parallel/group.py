"""Sums and gathers over the ranks of one model, by ``torch.distributed``: NCCL where each rank has a GPU of its own,
gloo elsewhere. A group belongs to its owner; torch's global default group is not used."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, TCPStore

from microscale.errors import RankFailed
from microscale.parallel.sharding import Shard

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store

LOOPBACK = "127.0.0.1"
WAIT = timedelta(seconds=120)
"""How long one sum may take, other ranks' delays included. A rank that dies is noticed at once; this is for one that
hangs."""


def file_store(file: str, world: int) -> Store:
    """The store through which ranks of one machine find each other."""
    return FileStore(file, world)


def network_store(address: str, port: int, world: int, server: socket.socket | None = None) -> Store:
    """The store through which ranks of several machines find each other. ``server``: rank 0's listening socket."""
    if server is None:
        return TCPStore(address, port, world, False, WAIT)
    return TCPStore(address, port, world, True, WAIT, False, False, server.detach())


class Group:
    """One rank's end. All ranks call the same methods in the same order."""

    def __init__(
        self, shard: Shard, store: Store, device: torch.device, *, nccl: bool = False, address: str = LOOPBACK
    ) -> None:
        """Returns when all ranks are connected. ``address``: the network interface that gloo uses on this machine."""
        self.shard = shard
        self.world = shard.world
        self.uncapturable = None if nccl else "gloo adds up in the host's memory"
        self._nccl = nccl
        with _failing(shard):
            self._group: Any = _connect_nccl(shard, store, device) if nccl else _connect_gloo(shard, store, address)
        # Anything that is set up lazily is set up now, not in the first request or while a graph is captured.
        self.sum(torch.zeros(1, device=device))

    def sum(self, part: Tensor) -> Tensor:
        """The sum over all ranks, with the same bits on each. It is computed in float32; for two bf16 numbers a single
        addition in bf16 is the same."""
        whole = self._sendable(part)
        if self.world > 2 or not self._nccl:
            whole = whole.float()
        with _failing(self.shard):
            self._group.allreduce([whole]).wait()
        return whole.to(part)

    def columns(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """On rank 0 a matrix of which each rank has some columns, ``widths`` in all; ``None`` on the other ranks."""
        sent = self._sendable(torch.nn.functional.pad(part, (0, max(widths) - part.shape[1])))
        into = [torch.empty_like(sent) for _ in widths] if self.shard.is_first else []
        options = dist.GatherOptions()
        options.rootRank = 0
        with _failing(self.shard):
            self._group.gather([into] if into else [], [sent], options).wait()
        if not into:
            return None
        return torch.cat([columns[:, :width] for columns, width in zip(into, widths, strict=True)], dim=1).to(part)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's numbers, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        sent = self._sendable(tensor)
        with _failing(self.shard):
            self._group.broadcast([sent], options).wait()
        return sent if sent is tensor else tensor.copy_(sent)

    def _sendable(self, tensor: Tensor) -> Tensor:
        """Contiguous, and in the host's memory for gloo."""
        tensor = tensor.contiguous()
        return tensor if self._nccl else tensor.cpu()


@contextmanager
def _failing(shard: Shard) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's error for a peer that is gone or late
        raise RankFailed(f"Rank {shard.rank} lost another rank: {str(error).splitlines()[0]}") from error


def _connect_nccl(shard: Shard, store: Store, device: torch.device) -> Any:
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = WAIT
    return dist.ProcessGroupNCCL(store, shard.rank, shard.world, options)


def _connect_gloo(shard: Shard, store: Store, address: str) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = WAIT
    return dist.ProcessGroupGloo(store, shard.rank, shard.world, options)
