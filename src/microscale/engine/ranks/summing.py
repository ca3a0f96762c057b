"""How the ranks of this model add up: decided once, by all of them alike (``hardware/sums.py`` has the table)."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from microscale import settings
from microscale.backends.ops import Ranks
from microscale.backends.peer_ranks import PeerRanks, peer_bytes
from microscale.errors import RankFailed
from microscale.hardware.sums import Joined, Reduction
from microscale.parallel.answers import Answers
from microscale.parallel.group import Group
from microscale.parallel.peers import Mapped, Unmapped, map_peers
from microscale.settings import PeerSums

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


def agree_on_sums(group: Group, joined: Joined, device: torch.device) -> tuple[Ranks, Joined]:
    """The ranks as a model asks them, and how they are joined: all know the same. Where one of them cannot map the
    others' memory, all leave their sums to the library."""
    if not joined.on_gpus:
        return group, joined
    found = _map_if_all_can(group, joined, device)
    if isinstance(found, Mapped):
        _say(group, f"Small sums go through {Reduction.PEERS}, others by {joined.backend}.")
        return PeerRanks.over(group, group.shard.rank, found), joined
    if settings.load().peer_sums is PeerSums.REQUIRED:
        raise RankFailed(
            f"No sum can go through peer-mapped memory, as MICROSCALE_PEER_SUMS=1 demands: {found.because}; without it "
            f"all go by {joined.backend}."
        )
    _say(group, f"All sums go by {joined.backend}, none through peer-mapped memory: {found.because}.")
    return group, replace(joined, unmapped=found.because)


def _map_if_all_can(group: Group, joined: Joined, device: torch.device) -> Mapped | Unmapped:
    # One that knows already that it cannot would let the others wait for it.
    able = Answers(group.store, group.shard, "microscale-able")
    able.say(joined.refuses_peers())
    reason = able.why_not()
    if reason is not None:
        return Unmapped(reason)
    return map_peers(group.store, group.shard, device, peer_bytes(group.world))


def _say(group: Group, text: str) -> None:
    """One rank does, for all."""
    if group.shard.is_first:
        log.info("%s", text)
