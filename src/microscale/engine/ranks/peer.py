"""Two machines look at each other before they share a model: versions, network, clocks, and what a sum costs.

One waits (``host``), the other comes (``visit``); both know the secret, and both are told the same findings.
"""

from __future__ import annotations

import json
import socket
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from microscale.engine.protocol.frames import HEADER, frame
from microscale.engine.ranks.nodes import connect, gather, listen
from microscale.errors import BadMessage
from microscale.parallel.group import Group, Meeting, meet_over, open_store
from microscale.parallel.sharding import Shard
from microscale.parallel.transport import Transport

MAX_FACTS = 2**16
ROUNDS = {6 << 10: 100, 16 << 20: 5}
"""Bytes of a sum → how often it is timed: one token's of gpt-oss, and a long prompt's."""
SLOW_US = 200.0
"""A sum of one token that takes longer costs more than it gives: gpt-oss-120b has 72 of them a token."""
CLOCK_S = 1.0


@dataclass(frozen=True)
class PeerFinding:
    """``mend``: what to do about it; ``None`` where all is well."""

    name: str
    value: str
    mend: str | None = None


def host(address: str, port: int, secret: bytes) -> list[PeerFinding]:
    """Wait for the other machine at one's own ``address``."""
    with listen(address, port) as server:
        sock = gather(server, {1}, secret)[1]
    with sock, listen(address, 0) as meeting:
        theirs = _exchange(sock, facts() | {"port": meeting.getsockname()[1]})
        network, found = _network(sock), compare(theirs)
        store = open_store(meeting, address, 2)
        group = Group(Shard(0, 2), Meeting(store, Transport.GLOO, address), torch.device("cpu"))
        return [network, *found, *_times(group)]


def visit(address: str, port: int, secret: bytes) -> list[PeerFinding]:
    """Come to the machine that waits at ``address``."""
    with connect(address, port, 1, secret) as sock:
        theirs = _exchange(sock, facts() | {"port": 0})
        network, found = _network(sock), compare(theirs)
        leader, own = sock.getpeername()[0], sock.getsockname()[0]
        meeting = meet_over(leader, int(theirs["port"]), Shard(1, 2), Transport.GLOO, own)
        return [network, *found, *_times(Group(Shard(1, 2), meeting, torch.device("cpu")))]


def facts() -> dict[str, Any]:
    """What must be alike on both sides, and the time."""
    gpus = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    return {
        "torch": torch.__version__,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if gpus else "none: no GPU here",
        "CUDA driver": _driver(),
        "GPUs": ", ".join(gpus) or "none",
        "clock": time.time(),
    }


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split("Module")[-1].split()[0]
    except (OSError, IndexError):
        return "none"


def _exchange(sock: socket.socket, own: Mapping[str, Any]) -> dict[str, Any]:
    sock.sendall(frame(json.dumps(own).encode()))
    size = int.from_bytes(_read(sock, HEADER), "big")
    if size > MAX_FACTS:
        raise BadMessage(f"The other machine sends {size} bytes of facts; {MAX_FACTS} are the most.")
    try:
        found = json.loads(_read(sock, size))
    except ValueError as error:
        raise BadMessage(f"What the other machine says of itself cannot be read: {error}.") from None
    if not isinstance(found, dict) or not own.keys() <= found.keys():
        raise BadMessage("What the other machine says of itself lacks something; run the same Microscale on both.")
    return found


def _read(sock: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        data = sock.recv(count - len(found))
        if not data:
            raise BadMessage("The other machine has closed the connection.")
        found += data
    return found


def _network(sock: socket.socket) -> PeerFinding:
    return PeerFinding("Network", f"{sock.getsockname()[0]} here, {sock.getpeername()[0]} there")


def compare(theirs: Mapping[str, Any]) -> list[PeerFinding]:
    """``theirs``: as they have just come."""
    own, found = facts(), []
    for name in ("torch", "NCCL", "CUDA driver", "GPUs"):
        here, there = own[name], str(theirs[name])[:200]
        if here == there:
            found.append(PeerFinding(name, f"{here} on both"))
        else:
            found.append(PeerFinding(name, f"{here} here, {there} there", f"Use the same {name} on both machines."))
    apart = abs(own["clock"] - float(theirs["clock"]))
    mend = None if apart < CLOCK_S else "Have both machines follow a time server (chrony, systemd-timesyncd)."
    return [*found, PeerFinding("Clocks", f"{apart:.1f} s apart", mend)]


def _times(group: Group) -> list[PeerFinding]:
    """What sums take over gloo, between this moment's processes: NCCL over a fast network takes less."""
    found = []
    for size, rounds in ROUNDS.items():
        numbers = torch.ones(size // 4)
        seconds = []
        for _ in range(rounds):
            begin = time.perf_counter()
            group.sum(numbers.clone())
            seconds.append(time.perf_counter() - begin)
        median = statistics.median(seconds)
        slow = size < 1 << 20 and median * 1e6 > SLOW_US
        value = f"{median * 1e6:.0f} us over gloo, {size * 8 / median / 1e9:.2f} Gbit/s each way"
        name = f"Sum of {size >> 10} KiB" if size < 1 << 20 else f"Sum of {size >> 20} MiB"
        found.append(PeerFinding(name, value, _SLOW if slow else None))
    return found


_SLOW = "Use a faster interface: --master-addr decides which; a token of gpt-oss-120b waits for 72 such sums."
