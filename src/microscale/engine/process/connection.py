"""The engine process's end of the socket to its owner."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import time
from collections import deque

from microscale.engine.protocol.frames import FrameReader
from microscale.engine.protocol.messages import FromEngine, Hello, ToEngine, decode_for_engine, encode

GRACE_S = 0.5
"""How long a load or a step may go on after the owner is gone. Then the process ends in the middle of it."""
CHUNK = 2**18
MAX_TURN = 2**22
"""Bytes that are read between two steps: a flood of requests does not hold up those that run."""
MAX_UNSENT = 2**20
"""Bytes that wait for an owner who is busy with something else: a thousand steps of 64 requests."""


class OwnerGone(Exception):
    """The other end of the socket is closed."""


class Connection:
    """The socket to the owner, in messages.

    The owner may stop reading for a while: up to ``MAX_UNSENT`` bytes wait here, and only then does the engine wait.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = FrameReader()
        self._unread: deque[bytes] = deque()
        self._unsent = bytearray()
        # Signals write a byte here, so that a wait for messages ends.
        self._woken, wake = socket.socketpair()
        self._woken.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.detach(), warn_on_full_buffer=False)
        # Not select(): the owner's server may have a thousand files open, and this is one of its numbers.
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)

    def next_frame(self) -> bytes:
        """Wait for one message."""
        while not self._unread:
            self._turn(None)
        return self._unread.popleft()

    def messages(self, wait_s: float | None) -> list[ToEngine]:
        """What has come. Waits up to ``wait_s``, or as long as it takes, until something has, or a signal, or some of
        what waits could go."""
        self._turn(0 if self._unread else wait_s)
        messages = [decode_for_engine(payload) for payload in self._unread]
        self._unread.clear()
        return messages

    def send(self, message: FromEngine | Hello) -> None:
        self._unsent += encode(message)
        self._write(wait=len(self._unsent) > MAX_UNSENT)

    def send_last(self, message: FromEngine, within_s: float | None = None) -> None:
        """Send, and see that all is sent."""
        self._unsent += encode(message)
        self._sock.settimeout(within_s)
        self._write(wait=True)

    def _turn(self, wait_s: float | None) -> None:
        """Write and read what can be without waiting, after one wait if that is wanted."""
        self._poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        ready = {fd for fd, _ in self._poll.poll(None if wait_s is None else wait_s * 1000)}
        if self._woken.fileno() in ready:
            self._woken.recv(CHUNK)
        if self._sock.fileno() in ready:
            self._write(wait=False)
            self._read()

    def _write(self, wait: bool) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent, 0 if wait else socket.MSG_DONTWAIT)]
        except BlockingIOError:
            return
        except OSError as error:
            raise OwnerGone from error

    def _read(self) -> None:
        size = 0
        while size < MAX_TURN:
            try:
                data = self._sock.recv(CHUNK, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                raise OwnerGone from error
            if not data:
                raise OwnerGone
            size += len(data)
            self._unread.extend(self._reader.feed(data))


PR_SET_PDEATHSIG = 1


def end_with_owner() -> None:
    """Have this process killed when the thread that started it ends, even if it is stopped then."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def watch_owner(sock: socket.socket) -> None:
    """End this process when the owner is gone and the loop does not see it: a load can take minutes, a kernel hang."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    poll.poll()
    time.sleep(GRACE_S)
    os._exit(0)
