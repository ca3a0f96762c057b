"""Rank 0's watch over the other ranks: reports in one sentence which of them failed, and how.

A rank can end (its connection closes), report a fault, or fall silent because it was stopped or its machine hangs. Each
ends the engine. All ranks are killed, which ends every wait for a sum, and the fault is raised in rank 0's own thread.
Where that thread is idle or waits for something else, ``on_stuck`` is called.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from microscale.engine.protocol.messages import error_of
from microscale.engine.ranks.messages import (
    Assembled,
    Fault,
    FromFollower,
    LinkClosed,
    Loaded,
    RankPrepared,
    decode_for_leader,
)
from microscale.engine.ranks.processes import EXIT_S, Peer
from microscale.errors import BadMessage, MicroscaleError, RankFailed

Answer = TypeVar("Answer", RankPrepared, Loaded, Assembled)
POLL_S = 0.2
NOTICE_S = 0.5
"""How long rank 0's own thread has to raise a fault before ``on_stuck`` is called."""
BLAME_S = 1.0
"""How long a rank that lost another one waits before it reports that: the rank at fault comes first."""


@dataclass(frozen=True)
class Patience:
    """How long a rank may be silent."""

    starting_s: float = 120.0
    """Until it has prepared: imports from a cold disk may block its heartbeat."""
    running_s: float = 10.0


PATIENCE = Patience()


class Watch:
    """A thread that reads the other ranks' messages until one fails, or until ``close``."""

    def __init__(self, peers: list[Peer], patience: Patience) -> None:
        self.peers = peers
        self.on_stuck: Callable[[MicroscaleError], None] = lambda error: None
        """Called with a fault that no step can raise: rank 0 is idle, or its step cannot return."""
        self._patience = patience
        self._changed = threading.Condition()
        self._fault: MicroscaleError | None = None
        self._raised = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    # ---- called by rank 0's own thread ----

    def check(self) -> None:
        """Raise the fault, if there is one."""
        if self._fault is not None:
            self._raised.set()
            raise self._fault

    def wait_for(self, kind: type[Answer]) -> list[Answer]:
        """The next answer of every rank, in order."""
        answers: list[Answer] = []
        for peer in self.peers:
            with self._changed:
                while not peer.answers and self._fault is None:
                    self._changed.wait()
                self.check()
                answer = peer.answers.popleft()
            if not isinstance(answer, kind):
                raise RankFailed(f"{peer} sent {type(answer).__name__} instead of {kind.__name__}.")
            answers.append(answer)
        return answers

    def cause(self, error: RankFailed) -> MicroscaleError:
        """The fault behind ``error``, which a sum has raised on rank 0: which rank failed is known in a moment."""
        with self._changed:
            self._changed.wait_for(lambda: self._fault is not None, BLAME_S + EXIT_S + 1.0)
        self._raised.set()
        return self._fault or error

    def close(self) -> None:
        self._closed = True
        self._raised.set()
        self._thread.join()

    # ---- the thread ----

    def _run(self) -> None:
        poll = select.poll()
        by_file = {peer.link.sock.fileno(): peer for peer in self.peers}
        for file in by_file:
            poll.register(file, select.POLLIN)
        while not self._closed and self._fault is None:
            for file, _ in poll.poll(POLL_S * 1000):
                if self._fault is None and not self._closed:
                    self._read(by_file[file])
            for peer in self.peers:
                silence = time.monotonic() - peer.heard_at
                if silence > (self._patience.running_s if peer.has_prepared else self._patience.starting_s):
                    self._fail(RankFailed(f"{peer} has been silent for {silence:.0f} s; the engine ends with it."))
        if self._fault is not None and not self._raised.wait(NOTICE_S) and not self._closed:
            self.on_stuck(self._fault)

    def _read(self, peer: Peer) -> None:
        try:
            messages = [decode_for_leader(payload) for payload in peer.link.read()]
        except LinkClosed:
            if not self._closed:
                self._fail(RankFailed(f"{peer} {peer.how_it_ended()}; the engine ends with it."))
            return
        except BadMessage as error:
            self._fail(RankFailed(f"{peer} does not follow the protocol: {error}"))
            return
        peer.heard_at = time.monotonic()
        for message in messages:
            self._take(peer, message)

    def _take(self, peer: Peer, message: FromFollower) -> None:
        if isinstance(message, Fault):
            self._fail(error_of(message.kind, f"{peer}: {message.text}"))
        elif isinstance(message, (RankPrepared, Loaded, Assembled)):
            with self._changed:
                peer.has_prepared = True
                peer.answers.append(message)
                self._changed.notify_all()

    def _fail(self, error: MicroscaleError) -> None:
        with self._changed:
            if self._fault is not None or self._closed:
                return
            self._fault = error
            self._changed.notify_all()
        for peer in self.peers:
            peer.kill()
