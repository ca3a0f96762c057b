"""Memory of GPUs that every rank of a machine maps: each has a buffer, and writes into those of the others.

Torch's symmetric memory makes and exchanges the handles. It finds the ranks through a process group that is registered
under a name; ours is there while memory is mapped, and has no backend: torch asks it for store, rank and size alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import (
    HashStore,
    PrefixStore,
    ProcessGroup,
    _register_process_group,
    _SymmetricMemory,
    _unregister_process_group,
)
from torch.distributed.distributed_c10d import GroupName

from microscale.parallel.answers import Answers
from microscale.parallel.exchange import Exchange, GivenUp
from microscale.parallel.sharding import Shard

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import (
        Store,
    )

NAME = "microscale-peers"


@dataclass(frozen=True)
class Mapped:
    """Buffers of all ranks, in order, mapped to one rank's device. They last as long as this is kept."""

    buffers: tuple[Tensor, ...]
    handle: object
    """The library's."""


@dataclass(frozen=True)
class Unmapped:
    """Not all ranks could map the others' memory."""

    because: str


def map_peers(store: Store, shard: Shard, device: torch.device, size: int) -> Mapped | Unmapped:
    """Buffers of ``size`` zeros. All ranks call it, or none; it returns when all buffers are there, or on every rank
    with the reason of one that cannot."""
    store = PrefixStore(NAME, store)
    answers = Answers(store, shard, "mapped")
    mapped: Mapped | None = None
    try:
        mapped = _map(Exchange(store, answers.refused), shard, device, size)
        answers.say(None)
    except GivenUp:
        answers.say(None)  # it is another's reason that counts
    except Exception as error:  # whatever it is, the others must hear of it
        answers.say(_first_line(error))
    reason = answers.why_not()
    if reason is not None:
        return Unmapped(reason)
    assert mapped is not None  # all ranks can, so this one has
    return mapped


def _first_line(error: Exception) -> str:
    """Torch says in further lines where in its code it was."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _map(store: Store, shard: Shard, device: torch.device, size: int) -> Mapped:
    with registered(store, shard) as name:
        own = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device, name)
        own.zero_()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # nobody may write before
        handle = _SymmetricMemory.rendezvous(own, name)
        every = [
            own if rank == shard.rank else handle.get_buffer(rank, (size,), torch.uint8, 0)
            for rank in range(shard.world)
        ]
    return Mapped(tuple(every), handle)


@contextmanager
def registered(store: Store, shard: Shard) -> Iterator[GroupName]:
    """A name under which torch finds store, rank and number of ranks meanwhile. It opens no connections."""
    name = GroupName(f"{NAME}-{secrets.token_hex(8)}")
    group = ProcessGroup(store, shard.rank, shard.world)
    _register_process_group(name, group)  # which keeps no reference: the group must last as long
    try:
        yield name
    finally:
        _unregister_process_group(name)


def why_unshareable(device: torch.device, size: int) -> str | None:
    """Why this GPU gives no memory that others could map, as far as one process can find out by itself."""
    found = map_peers(HashStore(), Shard(0, 1), device, size)
    return found.because if isinstance(found, Unmapped) else None
