"""Two machines show each other that they know the same secret, before either believes anything that the other says.

    rank 0                                   another rank
      a random number  ──────────────────────►
      ◄──────────────── a random number, proof          HMAC-SHA256 of "rank", both numbers, under the secret
      proof ─────────────────────────────────►          the same of "leader"

The secret itself never travels. What follows is neither encrypted nor signed: this keeps out who has no business here,
not who can write into the connection.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from pathlib import Path

from microscale.errors import BadMessage, BadSetting

NONCE = 32
LEAST_SECRET = 16
WITHIN_S = 10.0
"""Of a stranger that says nothing."""


def read_secret(file: Path) -> bytes:
    """The secret of ``--rank-secret-file``: all of the file but the space around it."""
    try:
        found = file.read_bytes().strip()
    except OSError as error:
        raise BadSetting(f"--rank-secret-file {file} cannot be read: {error.strerror}.") from None
    if len(found) < LEAST_SECRET:
        raise BadSetting(
            f"--rank-secret-file {file} holds {len(found)} bytes; give at least {LEAST_SECRET}, "
            f"as from `openssl rand -hex 32`."
        )
    return found


def admit(sock: socket.socket, secret: bytes) -> None:
    """Rank 0's side: raise unless the other end knows the secret."""
    sock.settimeout(WITHIN_S)
    own = secrets.token_bytes(NONCE)
    sock.sendall(own)
    theirs, proof = _read(sock, NONCE), _read(sock, NONCE)
    if not hmac.compare_digest(proof, _proof(secret, b"rank", own, theirs)):
        raise BadMessage("It does not know the secret of --rank-secret-file.")
    sock.sendall(_proof(secret, b"leader", own, theirs))
    sock.settimeout(None)


def introduce(sock: socket.socket, secret: bytes) -> None:
    """The other side: raise unless this is rank 0, and has let us in."""
    sock.settimeout(WITHIN_S)
    theirs, own = _read(sock, NONCE), secrets.token_bytes(NONCE)
    sock.sendall(own + _proof(secret, b"rank", theirs, own))
    try:
        proof = _read(sock, NONCE)
    except BadMessage:
        raise BadMessage("Rank 0 has refused this rank: the secrets of --rank-secret-file differ.") from None
    if not hmac.compare_digest(proof, _proof(secret, b"leader", theirs, own)):
        raise BadMessage("What answers at --master-addr does not know the secret of --rank-secret-file.")
    sock.settimeout(None)


def _proof(secret: bytes, who: bytes, leaders: bytes, ranks: bytes) -> bytes:
    return hmac.new(secret, who + leaders + ranks, hashlib.sha256).digest()


def _read(sock: socket.socket, count: int) -> bytes:
    found = b""
    try:
        while len(found) < count:
            data = sock.recv(count - len(found))
            if not data:
                raise BadMessage("It has closed the connection.")
            found += data
    except OSError as error:
        raise BadMessage(f"It cannot be read from: {error}.") from None
    return found
