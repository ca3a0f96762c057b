"""A stream of messages between two ranks: what is sent goes out whole, whoever sends it."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterable

from microscale.engine.protocol.frames import FrameReader
from microscale.engine.ranks.messages import FromFollower, ToFollower, encode

CHUNK = 2**18


class LinkClosed(Exception):
    """The other end is gone."""


class Link:
    """One end. One thread reads; any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._reader = FrameReader()
        self._unread: deque[bytes] = deque()
        self._sending = threading.Lock()

    def send(self, message: ToFollower | FromFollower) -> None:
        data = encode(message)
        try:
            with self._sending:
                self.sock.sendall(data)
        except OSError as error:
            raise LinkClosed from error

    def next(self) -> bytes:
        """Wait for one message."""
        while not self._unread:
            self._unread.extend(self.read())
        return self._unread.popleft()

    def read(self) -> Iterable[bytes]:
        """Whatever has come, after waiting for some of it."""
        try:
            data = self.sock.recv(CHUNK)
        except OSError as error:
            raise LinkClosed from error
        if not data:
            raise LinkClosed
        return self._reader.feed(data)

    def close(self) -> None:
        self.sock.close()
