"""One of several ranks that try to map each other's memory, the host's here:
``support.joining_rank RANK WORLD STORE [FAILS_AT]``. Prints a JSON object: how it adds up, and what it saw."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch
from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _resolve_process_group
from torch.distributed.distributed_c10d import GroupName

from microscale.backends.peer_ranks import PeerRanks
from microscale.engine.ranks.summing import agree_on_sums
from microscale.errors import RankFailed
from microscale.hardware.sums import PEER_WORLDS, Joined, sums_table, sums_text
from microscale.parallel import peers
from microscale.parallel.group import Group, meet_at
from microscale.parallel.sharding import Shard
from microscale.parallel.transport import Transport
from support.host_peers import HostMemory

CPU = torch.device("cpu")
SIZE = 256


def is_registered(name: GroupName) -> bool:
    try:
        _resolve_process_group(name)
    except RuntimeError:
        return False
    return True


def map_directly(group: Group) -> dict[str, object]:
    """For numbers of ranks that have no kernel."""
    found = peers.map_peers(group.store, group.shard, CPU, SIZE)
    if isinstance(found, peers.Unmapped):
        return {"because": found.because}
    zeros = int(found.buffers[group.shard.rank].sum()) == 0
    group.sum(torch.zeros(1))  # nobody writes before all have looked
    for buffer in found.buffers:
        buffer[group.shard.rank] = 1 + group.shard.rank
    group.sum(torch.zeros(1))
    return {"zeros": zeros, "seen": [buffer[: group.world].tolist() for buffer in found.buffers]}


def agree(group: Group) -> dict[str, object]:
    try:
        ranks, joined = agree_on_sums(group, Joined(group.world), CPU)
    except RankFailed as error:
        return {"error": str(error)}
    total = ranks.sum(torch.ones(65, 3)) if not isinstance(ranks, PeerRanks) else group.sum(torch.ones(1))
    return {
        "peers": isinstance(ranks, PeerRanks),
        "sum": float(total.max()),
        "told": sums_text(sums_table(joined, SIZE), SIZE),
    }


def main() -> None:
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    memory = HostMemory(Path(store).parent, {rank: sys.argv[4]} if len(sys.argv) > 4 else {})
    names: list[GroupName] = []

    def register(name: GroupName, group: ProcessGroup) -> None:
        names.append(name)
        _register_process_group(name, group)

    group = Group(Shard(rank, world), meet_at(store, world, Transport.GLOO), CPU)
    began = time.monotonic()
    with patch.object(peers, "_SymmetricMemory", memory), patch.object(peers, "_register_process_group", register):
        told = agree(group) if world in PEER_WORLDS else map_directly(group)
    told |= {
        "seconds": time.monotonic() - began,
        "found": memory.found,
        "left": [name for name in names if is_registered(name)],
        "names": len(names),
    }
    print(json.dumps(told), flush=True)
    group.sum(torch.zeros(1))


if __name__ == "__main__":
    main()
