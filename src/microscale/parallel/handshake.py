"""Ranks on several machines connect to rank 0, and both sides prove that they know the same secret.

    rank 0                                   another rank
      nonce ─────────────────────────────────►
      ◄───────────────────────── nonce, proof             HMAC-SHA256 of "rank" and both nonces, keyed by the secret
      proof ─────────────────────────────────►            the same for "leader"
      ◄──────────────────────────────── rank

The secret is never sent. What follows is neither encrypted nor signed: the handshake keeps strangers out, but not an
attacker who can write into the connection. Nothing here imports torch, because the command line reads this file first.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from microscale.errors import BadMessage, BadSetting, RankFailed

NONCE_BYTES = 32
MIN_SECRET_BYTES = 16
HANDSHAKE_S = 10.0
JOIN_S = 300.0
"""How long rank 0 waits for the other machines, and they for rank 0: people start them by hand."""
RETRY_S = 0.5
LOST_MS = 12_000
"""A connection is closed when nothing was acknowledged for this long: a cable is unplugged or a machine is off."""
RANK = struct.Struct("!I")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Nodes:
    """The machines that share a model. Each runs the same number of ranks."""

    count: int
    address: str
    """Where rank 0 listens."""
    port: int
    secret_file: str


def read_secret(file: Path) -> bytes:
    """The content of ``--rank-secret-file`` without surrounding white space."""
    try:
        secret = file.read_bytes().strip()
    except OSError as error:
        raise BadSetting(f"--rank-secret-file {file} cannot be read: {error.strerror}.") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise BadSetting(
            f"--rank-secret-file {file} holds {len(secret)} bytes; use at least {MIN_SECRET_BYTES}, "
            f"for example from `openssl rand -hex 32`."
        )
    return secret


def listen(address: str, port: int) -> socket.socket:
    """Listen at this address only, not at every address of the machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        raise BadSetting(f"Cannot listen at --master-addr {address} --master-port {port}: {error}.") from None


def accept(server: socket.socket, ranks: set[int], secret: bytes, within_s: float = JOIN_S) -> dict[int, socket.socket]:
    """Rank 0's side: one connection for each of ``ranks``. Strangers are rejected and change nothing."""
    accepted: dict[int, socket.socket] = {}
    deadline = time.monotonic() + within_s
    while missing := sorted(ranks - accepted.keys()):
        server.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            sock, peer = server.accept()
        except TimeoutError:
            names = ", ".join(map(str, missing))
            raise RankFailed(
                f"Rank {names} did not connect within {within_s:.0f} s; start the other machines with --node-rank, and "
                f"check that they can reach this address."
            ) from None
        try:
            admit(sock, secret)
            (rank,) = RANK.unpack(_read(sock, RANK.size))
            if rank not in missing:
                raise BadMessage(f"It claims to be rank {rank}, which is already connected or does not exist.")
        except (BadMessage, OSError) as error:
            log.warning("Rejected a connection from %s: %s", peer[0], error)
            sock.close()
            continue
        _tune(sock)
        accepted[rank] = sock
    return accepted


def connect(address: str, port: int, rank: int, secret: bytes, within_s: float = JOIN_S) -> socket.socket:
    """Another rank's side: connect to rank 0 as soon as it listens."""
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
    _tune(sock)
    return sock


def admit(sock: socket.socket, secret: bytes) -> None:
    """Rank 0's half of the handshake: raise unless the other end knows the secret."""
    sock.settimeout(HANDSHAKE_S)
    own = secrets.token_bytes(NONCE_BYTES)
    sock.sendall(own)
    theirs, proof = _read(sock, NONCE_BYTES), _read(sock, NONCE_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"rank", own, theirs)):
        raise BadMessage("It does not know the secret of --rank-secret-file.")
    sock.sendall(_proof(secret, b"leader", own, theirs))


def introduce(sock: socket.socket, secret: bytes) -> None:
    """The other half: raise unless this is rank 0 and it has accepted us."""
    sock.settimeout(HANDSHAKE_S)
    theirs, own = _read(sock, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    sock.sendall(own + _proof(secret, b"rank", theirs, own))
    try:
        proof = _read(sock, NONCE_BYTES)
    except BadMessage:
        raise BadMessage("Rank 0 has rejected this rank: the secrets of --rank-secret-file differ.") from None
    if not hmac.compare_digest(proof, _proof(secret, b"leader", theirs, own)):
        raise BadMessage("The process at --master-addr does not know the secret of --rank-secret-file.")


def _proof(secret: bytes, role: bytes, leaders: bytes, ranks: bytes) -> bytes:
    return hmac.new(secret, role + leaders + ranks, hashlib.sha256).digest()


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    try:
        while len(data) < count:
            more = sock.recv(count - len(data))
            if not more:
                raise BadMessage("It has closed the connection.")
            data += more
    except OSError as error:
        raise BadMessage(f"It cannot be read from: {error}.") from None
    return data


def _tune(sock: socket.socket) -> None:
    """Send small messages at once, and notice within seconds when the other machine is gone."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_MS)
