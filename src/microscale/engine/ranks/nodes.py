"""Ranks on several machines: rank 0 listens until all are there, the others connect. Both know a secret."""

from __future__ import annotations

import logging
import socket
import struct
import time

from microscale.errors import BadMessage, BadSetting, RankFailed
from microscale.parallel.handshake import admit, introduce

log = logging.getLogger(__name__)

JOIN_S = 300.0
"""How long rank 0 waits for the other machines, and they for it: somebody starts them by hand."""
RETRY_S = 0.5
LOST_MS = 12_000
"""A connection over which nothing is acknowledged for so long is gone: a cable is out, a machine is off."""
RANK = struct.Struct("!I")


def prepare_socket(sock: socket.socket) -> None:
    """Small messages go out at once, and a peer that vanished is noticed in seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_MS)


def listen(address: str, port: int) -> socket.socket:
    """At this address alone, not at every address of the machine."""
    try:
        return socket.create_server((address, port), family=_family(address))
    except OSError as error:
        raise BadSetting(f"--master-addr {address} --master-port {port} cannot be listened at: {error}.") from None


def gather(server: socket.socket, ranks: set[int], secret: bytes, within_s: float = JOIN_S) -> dict[int, socket.socket]:
    """The connections of these ranks. Strangers are turned away and change nothing."""
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + within_s
    while missing := sorted(ranks - found.keys()):
        server.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            sock, peer = server.accept()
        except TimeoutError:
            names = ", ".join(map(str, missing))
            raise RankFailed(
                f"Rank {names} did not come within {within_s:.0f} s; start the other machines with --node-rank, and "
                f"see that they reach this address."
            ) from None
        try:
            admit(sock, secret)
            (rank,) = RANK.unpack(_exactly(sock, RANK.size))
            if rank not in missing:
                raise BadMessage(f"It calls itself rank {rank}, which is here or is none of the {len(ranks) + 1}.")
        except (BadMessage, OSError) as error:
            log.warning("A connection from %s is turned away: %s", peer[0], error)
            sock.close()
            continue
        prepare_socket(sock)
        found[rank] = sock
    return found


def connect(address: str, port: int, rank: int, secret: bytes, within_s: float = JOIN_S) -> socket.socket:
    """To rank 0, as soon as it listens."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            sock = socket.create_connection((address, port), timeout=max(deadline - time.monotonic(), 0.001))
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RankFailed(f"Rank 0 cannot be reached at {address} port {port}: {error}.") from None
            time.sleep(RETRY_S)
    introduce(sock, secret)
    sock.sendall(RANK.pack(rank))
    prepare_socket(sock)
    return sock


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _exactly(sock: socket.socket, count: int) -> bytes:
    sock.settimeout(10.0)
    found = b""
    while len(found) < count:
        data = sock.recv(count - len(found))
        if not data:
            raise BadMessage("It has closed the connection.")
        found += data
    sock.settimeout(None)
    return found
