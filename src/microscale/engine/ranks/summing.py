"""How the ranks of this model add up: decided once, by all of them alike (``hardware/sums.py`` has the table)."""

from __future__ import annotations

import logging

import torch

from microscale import settings
from microscale.backends.ops import Ranks
from microscale.backends.peer_ranks import PeerRanks, peer_bytes
from microscale.engine.loading.options import LoadOptions
from microscale.hardware.sums import Joined, Reduction
from microscale.parallel.group import Group
from microscale.parallel.peers import map_peers, why_unmapped
from microscale.parallel.transport import Transport

log = logging.getLogger(__name__)


def joined_as(options: LoadOptions, transport: Transport, device: torch.device) -> Joined:
    """What this rank knows of how it is joined with the others."""
    world = options.shard.world
    if device.type == "cpu":
        return Joined(world, on_gpus=False, own_gpus=False)
    own_gpus, unmapped = transport is Transport.NCCL, None
    if not settings.load().peer_sums:
        unmapped = "MICROSCALE_PEER_SUMS is off"
    elif own_gpus and options.nodes is None:
        unmapped = why_unmapped(device, list(range(world)))
    elif not own_gpus and not settings.overlapping_devices():
        unmapped = "ranks share a GPU"
    return Joined(world, one_machine=options.nodes is None, own_gpus=own_gpus, unmapped=unmapped)


def agree_on_sums(group: Group, joined: Joined, device: torch.device) -> tuple[Ranks, Joined]:
    """The ranks as a model asks them, and how they are joined as all of them see it."""
    if not joined.on_gpus:
        return group, joined
    # One that cannot map the others' memory would leave those waiting for it.
    able = group.sum(torch.tensor([float(joined.refuses_peers() is None)], device=device))
    if joined.refuses_peers() is None and int(able) < group.world:
        joined = Joined(joined.world, True, joined.one_machine, joined.own_gpus, "another rank cannot")
    if joined.refuses_peers() is not None:
        log.info("All sums go by %s: %s.", joined.library, joined.refuses_peers())
        return group, joined
    mapped = map_peers(group.store, group.shard, device, peer_bytes(group.world))
    log.info("Small sums go through %s, others by %s.", Reduction.PEERS, joined.library)
    return PeerRanks.over(group, group.shard.rank, mapped), joined
