"""How the ranks of a model are joined, as far as one of them knows before they meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from microscale import settings
from microscale.backends.peer_ranks import peer_bytes
from microscale.engine.config import EngineConfig
from microscale.hardware.sums import Joined
from microscale.parallel.peer_access import why_unmapped
from microscale.parallel.transport import Transport
from microscale.settings import PEER_SUMS_OFF, PeerSums

if TYPE_CHECKING:
    import torch


def joined_as(options: EngineConfig, transport: Transport, device: torch.device) -> Joined:
    """What this rank knows of how it is joined with the others."""
    world = options.shard.world
    if device.type == "cpu":
        return Joined(world, on_gpus=False, own_gpus=False)
    own_gpus, unmapped = transport is Transport.NCCL, None
    if settings.load().peer_sums is PeerSums.OFF:
        unmapped = PEER_SUMS_OFF
    elif own_gpus and options.nodes is None:
        unmapped = why_unmapped(device, list(range(world)))
    elif not own_gpus and not settings.overlapping_devices():
        unmapped = "ranks share a GPU"
    return Joined(world, one_machine=options.nodes is None, own_gpus=own_gpus, unmapped=unmapped)


def peer_buffer(options: EngineConfig, device: torch.device) -> int:
    """Bytes of this rank's buffer for the others, where it knows of nothing against one."""
    if options.tensor_parallel_size == 1:
        return 0
    transport = Transport.NCCL if options.sharing == 1 else Transport.GLOO
    refused = joined_as(options, transport, device).refuses_peers()
    return 0 if refused is not None else peer_bytes(options.shard.world)
