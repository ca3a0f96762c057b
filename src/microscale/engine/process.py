"""The engine process: ``python -m microscale.engine.process --fd N``.

Its owner (``client.EngineClient``) starts it with one end of a socket pair as file ``N``; nobody else can reach it. It
greets, loads, and then turns between its messages and ``step()`` until its owner goes, or says ``Drain``, or SIGTERM
comes. torch is imported by the factory, after the greeting: a wrong version or option shows at once.

Exit status: 0 drained, or the owner is gone; 1 the engine failed; 2 the owner spoke nonsense.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Protocol

from microscale.engine.frames import FrameReader
from microscale.engine.messages import (
    MAX_OUTPUTS,
    VERSION,
    Abort,
    Accepted,
    Drain,
    Drained,
    EngineConfig,
    Failed,
    FromEngine,
    GetStats,
    Hello,
    Loading,
    Piece,
    Ready,
    Refused,
    StatsReply,
    Submit,
    ToEngine,
    Tokens,
    check_hello,
    decode_for_engine,
    encode,
    failure,
)
from microscale.errors import BadMessage, Draining, MicroscaleError

FACTORY = "microscale.engine.service:load"
GRACE_S = 0.5
"""What a load or a step may still take when the owner is gone; then the process ends in the midst of it."""
LAST_WORD_S = 1.0
"""How long an engine that failed tries to say so."""
CHUNK = 2**18
MAX_TURN = 2**22
"""Bytes that are read between two steps: a flood of requests does not hold up those that run."""
MAX_UNSENT = 2**20
"""Bytes that wait for an owner who is busy with something else: a thousand steps of 64 requests."""
log = logging.getLogger(__name__)


class Serves(Protocol):
    """What this process needs of an engine: see ``service.Service``."""

    ready: Ready

    @property
    def has_work(self) -> bool: ...

    def submit(self, message: Submit) -> None: ...

    def abort(self, number: int) -> None: ...

    def step(self) -> list[Piece]: ...

    def abort_all(self) -> list[Piece]: ...

    def stats(self) -> StatsReply: ...


Factory = Callable[[EngineConfig, Callable[[int, int], None]], Serves]


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
            self._turn(wait=True)
        return self._unread.popleft()

    def messages(self, wait: bool) -> list[ToEngine]:
        """What has come. With ``wait``, blocks until something has, or a signal, or some of what waits could go."""
        self._turn(wait and not self._unread)
        found = [decode_for_engine(payload) for payload in self._unread]
        self._unread.clear()
        return found

    def send(self, message: FromEngine | Hello) -> None:
        self._unsent += encode(message)
        self._write(wait=len(self._unsent) > MAX_UNSENT)

    def send_last(self, message: FromEngine, within_s: float | None = None) -> None:
        """Send, and see that all is sent."""
        self._unsent += encode(message)
        self._sock.settimeout(within_s)
        self._write(wait=True)

    def _turn(self, wait: bool) -> None:
        """Write and read what can be without waiting, after one wait if that is wanted."""
        self._poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        ready = {fd for fd, _ in self._poll.poll(None if wait else 0)}
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


def watch_owner(sock: socket.socket) -> None:
    """End this process when the owner is gone and the loop does not see it: a load can take minutes, a kernel hang."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    poll.poll()
    time.sleep(GRACE_S)
    os._exit(0)


class Loop:
    """Messages and steps by turns, until there is nothing left to wait for."""

    def __init__(self, service: Serves, connection: Connection, drain_s: float) -> None:
        self._service = service
        self._connection = connection
        self._drain_s = drain_s
        self._deadline: float | None = None
        """When draining ends; ``None`` while it has not begun."""

    def run(self) -> None:
        service = self._service
        while True:
            # One that drains and has no work left is done: it waits for nothing.
            wait = not service.has_work and self._deadline is None
            for message in self._connection.messages(wait):
                self._handle(message)
            if self._deadline is not None and (not service.has_work or time.monotonic() >= self._deadline):
                break
            if service.has_work:
                self._send(service.step())
        rest = service.abort_all()
        self._send(rest)
        self._connection.send_last(Drained(len(rest)))

    def drain(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def on_sigterm(self, signum: int, stack: object) -> None:
        self.drain(self._drain_s)

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._connection.send(self._submit(message))
            case Abort(number):
                self._service.abort(number)
            case GetStats():
                self._connection.send(self._service.stats())
            case Drain(deadline_s):
                self.drain(deadline_s)
            case EngineConfig():
                raise BadMessage("The engine is loaded already; a second one needs a process of its own.")

    def _submit(self, message: Submit) -> Accepted | Refused:
        try:
            if self._deadline is not None:
                raise Draining("The engine is about to stop and takes no new requests.")
            self._service.submit(message)
        except MicroscaleError as error:
            return Refused(message.number, *failure(error))
        return Accepted(message.number)

    def _send(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if piece.prompt_logprobs:
                self._connection.send(Tokens((piece,)))
        others = [piece for piece in pieces if not piece.prompt_logprobs]
        # A step without outputs is told too: the owner sees that the engine is alive.
        for first in range(0, max(len(others), 1), MAX_OUTPUTS):
            self._connection.send(Tokens(tuple(others[first : first + MAX_OUTPUTS])))


def greet(connection: Connection) -> EngineConfig:
    """Exchange versions; what the owner wants of the engine."""
    theirs = connection.next_frame()
    connection.send(Hello(VERSION))
    check_hello(theirs)
    config = decode_for_engine(connection.next_frame())
    if not isinstance(config, EngineConfig):
        raise BadMessage(f"The owner's second message must be Load and is {type(config).__name__}.")
    return config


def serve(connection: Connection, factory: str) -> None:
    config = greet(connection)
    module, _, name = factory.partition(":")
    load: Factory = getattr(importlib.import_module(module), name)
    service = load(config, lambda done, total: connection.send(Loading(done, total)))
    # A step must not wait for the collector to walk through what was loaded.
    gc.collect()
    gc.freeze()
    loop = Loop(service, connection, config.drain_s)
    # Only now: while it loads, SIGTERM ends the process as it ends any other.
    signal.signal(signal.SIGTERM, loop.on_sigterm)
    connection.send(service.ready)
    loop.run()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="microscale.engine.process", description="Started by EngineClient.")
    parser.add_argument("--fd", type=int, required=True, help="The socket to the owner.")
    parser.add_argument("--factory", default=FACTORY, help="What makes the engine, as module:function.")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="engine: %(message)s")
    logging.getLogger("microscale").setLevel(logging.INFO)
    sock = socket.socket(fileno=options.fd)
    # A compiler that this process starts must not keep the socket open after it.
    sock.set_inheritable(False)
    threading.Thread(target=watch_owner, args=(sock,), daemon=True).start()
    connection = Connection(sock)
    try:
        serve(connection, options.factory)
    except OwnerGone:
        return 0
    except MicroscaleError as error:
        log.error("%s", error)
        return fail(connection, error)
    except Exception as error:
        traceback.print_exc()
        return fail(connection, error)
    return 0


def fail(connection: Connection, error: Exception) -> int:
    """Tell the owner, if it listens, why this is the end. The exit status."""
    with contextlib.suppress(OwnerGone):
        connection.send_last(Failed(*failure(error)), LAST_WORD_S)
    return 2 if isinstance(error, BadMessage) else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads and destructors of a device that has failed can hang, and the owner waits for the end.
    os._exit(status)
