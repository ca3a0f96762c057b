"""Memory of GPUs that every rank of a machine maps: each has a buffer, and writes into those of the others.

``torch.distributed``'s symmetric memory makes and exchanges the handles; nothing of it is global here but a name.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, _SymmetricMemory

from microscale.errors import RankFailed
from microscale.parallel.sharding import Shard

NAME = "microscale-peers"


@dataclass(frozen=True)
class Mapped:
    """Buffers of all ranks, in order, mapped to one rank's device. They last as long as this is kept."""

    buffers: tuple[Tensor, ...]
    handle: object
    """The library's."""


def map_peers(store: Store, shard: Shard, device: torch.device, size: int) -> Mapped:
    """Buffers of ``size`` zeros. All ranks call it, or none; it returns when all buffers are there."""
    store = PrefixStore(NAME, store)
    # The library knows a group by a name that a process uses once, and that all ranks must use.
    if shard.is_first:
        store.set("name", f"{NAME}-{secrets.token_hex(8)}")
    name = store.get("name").decode()
    try:
        _SymmetricMemory.set_group_info(name, shard.rank, shard.world, store)
        own = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device, name)
        own.zero_()
        torch.cuda.synchronize(device)  # nobody may write before
        handle = _SymmetricMemory.rendezvous(own, name)
        others = [
            own if rank == shard.rank else handle.get_buffer(rank, (size,), torch.uint8, 0)
            for rank in range(shard.world)
        ]
    except RuntimeError as error:
        raise RankFailed(
            f"Rank {shard.rank} cannot map the other GPUs' memory: {str(error).splitlines()[0]}; "
            f"MICROSCALE_PEER_SUMS=0 leaves all sums to NCCL."
        ) from error
    return Mapped(tuple(others), handle)


def why_unmapped(device: torch.device, others: list[int]) -> str | None:
    """Why this GPU does not see the memory of some of these; ``None`` where it does."""
    own = device.index or 0
    for other in others:
        if other != own and not torch.cuda.can_device_access_peer(own, other):
            return f"GPU {own} has no access to the memory of GPU {other}"
    return None
