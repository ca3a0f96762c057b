"""Hears all other ranks and says, in one sentence, which of them is at fault and why.

A rank can end (its socket closes), say what is wrong, fall silent (stopped, or its machine is), run other sums than
rank 0, or be so slow that the others wait for it. Each ends the engine: its processes are killed, which ends every wait
for a sum at once, and the fault is raised where rank 0 waits. Where that waits for something else, ``on_stuck`` hears.
"""

from __future__ import annotations

import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from microscale.engine.protocol.messages import error_of
from microscale.engine.ranks.link import Link, LinkClosed
from microscale.engine.ranks.messages import (
    Alive,
    Assembled,
    Done,
    Fault,
    FromFollower,
    Loaded,
    Prepared,
    decode_for_leader,
)
from microscale.errors import BadMessage, MicroscaleError, RankFailed

Answer = TypeVar("Answer", Prepared, Loaded, Assembled)
TURN_S = 0.2
NOTICE_S = 2.0
"""How long rank 0 has to notice a fault by itself."""
ENDING_S = 5.0
"""A process whose connection is closed has ended, or will have by then."""


@dataclass(frozen=True)
class Patience:
    """How long a rank may be what."""

    starting_s: float = 120.0
    """Silent until it has prepared: imports may hold its interpreter."""
    silent_s: float = 10.0
    stopped_s: float = 3.0
    """Silent, and the system says that its process is stopped."""
    waited_s: float = 120.0
    """Rank 0 waits in one sum. A rank that has to compile a kernel first is not at fault."""
    others_s: float = 1.0
    """A rank that lost another one is not the one at fault: so long that one may show."""


@dataclass
class Peer:
    """Another rank, as rank 0 knows it."""

    rank: int
    link: Link
    process: subprocess.Popen[bytes] | None
    """Where it runs on this machine."""
    where: str = ""
    """The address of another machine."""
    heard_at: float = field(default_factory=time.monotonic)
    number: int = 0
    calls: int = 0
    answers: list[FromFollower] = field(default_factory=list)
    lost_at: float | None = None
    lost_text: str = ""
    has_prepared: bool = False

    def __str__(self) -> str:
        where = self.where if self.process is None else f"process {self.process.pid}"
        return f"Rank {self.rank} ({where})"

    def ended(self) -> str:
        """How its process ended, or that its connection did."""
        if self.process is None:
            return "is gone: its connection is closed"
        try:
            status = self.process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            return "has closed its connection"
        if status < 0:
            return f"was killed by signal {-status} ({signal.Signals(-status).name})"
        return f"ended with status {status}"

    @property
    def is_stopped(self) -> bool:
        """Whether its process is stopped, as by SIGSTOP."""
        if self.process is None:
            return False
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
        else:
            with suppress(OSError):
                self.link.sock.shutdown(socket.SHUT_RDWR)  # it ends when its leader is gone


class Watch:
    """A thread that hears the other ranks until one is at fault or ``close``."""

    def __init__(self, peers: list[Peer], patience: Patience, waits: Callable[[], tuple[int, float | None]]) -> None:
        """``waits``: how many sums rank 0 has begun, and since when it waits in the present one."""
        self.peers = peers
        self._patience = patience
        self._waits = waits
        self._changed = threading.Condition()
        self._fault: MicroscaleError | None = None
        self._noticed = threading.Event()
        self._closed = False
        self._done: dict[int, int] = {}
        self.on_stuck: Callable[[MicroscaleError], None] = lambda error: None
        """Hears of a fault that rank 0 has not noticed: it has no step to run, or cannot come back from one."""
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    # ---- rank 0's own thread ----

    def check(self) -> None:
        """Raise the fault, if there is one."""
        if self._fault is not None:
            self._noticed.set()
            raise self._fault

    def wait_for(self, kind: type[Answer]) -> list[Answer]:
        """The next answer of this kind, of every rank in their order."""
        found: list[Answer] = []
        for peer in self.peers:
            with self._changed:
                while not peer.answers and self._fault is None:
                    self._changed.wait()
                self.check()
                answer = peer.answers.pop(0)
            if not isinstance(answer, kind):
                raise RankFailed(f"{peer} said {type(answer).__name__} where {kind.__name__} was due.")
            found.append(answer)
        return found

    def verdict(self, error: RankFailed) -> MicroscaleError:
        """Which rank was at fault, when rank 0 has lost one: that shows in a moment."""
        with self._changed:
            self._changed.wait_for(lambda: self._fault is not None, NOTICE_S + self._patience.others_s + ENDING_S)
        self._noticed.set()
        return self._fault or error

    def ran(self, number: int, calls: int) -> None:
        """Rank 0 has run a step, with so many sums since the ranks met."""
        with self._changed:
            self._done[number] = calls
            while len(self._done) > 64:
                del self._done[next(iter(self._done))]

    def close(self) -> None:
        self._closed = True
        self._noticed.set()
        self._thread.join()

    # ---- the thread ----

    def _run(self) -> None:
        poll = select.poll()
        by_file = {peer.link.sock.fileno(): peer for peer in self.peers}
        for file in by_file:
            poll.register(file, select.POLLIN)
        while not self._closed and self._fault is None:
            for file, _ in poll.poll(TURN_S * 1000):
                if self._fault is None and not self._closed and not self._hear(by_file[file]):
                    poll.unregister(file)
            if not self._closed:
                self._look()
        if self._fault is not None and not self._noticed.wait(NOTICE_S) and not self._closed:
            self.on_stuck(self._fault)

    def _hear(self, peer: Peer) -> bool:
        """Take what has come. Whether more may."""
        try:
            messages = [decode_for_leader(payload) for payload in peer.link.read()]
        except LinkClosed:
            if peer.lost_at is None and not self._closed:
                self._blame(RankFailed(f"{peer} {peer.ended()}; the engine ends with it."))
            return False
        except BadMessage as error:
            self._blame(RankFailed(f"{peer} cannot be understood: {error}"))
            return False
        peer.heard_at = time.monotonic()
        for message in messages:
            self._take(peer, message)
        return True

    def _take(self, peer: Peer, message: FromFollower) -> None:
        match message:
            case Alive(number, calls):
                peer.number, peer.calls = number, calls
            case Done(number, calls):
                peer.number, peer.calls = number, calls
                with self._changed:
                    own = self._done.get(number, calls)
                if own != calls:
                    self._blame(
                        RankFailed(
                            f"{peer} disagrees with rank 0 on step {number}: it has run {calls} sums and rank 0 {own}."
                        )
                    )
            case Fault(kind, text, lost):
                if lost:
                    peer.lost_at, peer.lost_text = time.monotonic(), text
                else:
                    said = error_of(kind, f"{peer}: {text}")
                    self._blame(said)
            case Prepared() | Loaded() | Assembled():
                peer.has_prepared = True
                with self._changed:
                    peer.answers.append(message)
                    self._changed.notify_all()

    def _look(self) -> None:
        """Who is silent, who lets others wait, who was lost by others."""
        now, patience = time.monotonic(), self._patience
        for peer in self.peers:
            silence = now - peer.heard_at
            if peer.lost_at is None and silence > patience.stopped_s and peer.is_stopped:
                self._blame(RankFailed(f"{peer} has been stopped for {silence:.0f} s; the engine ends with it."))
            if peer.lost_at is None and silence > (patience.silent_s if peer.has_prepared else patience.starting_s):
                self._blame(RankFailed(f"{peer} has said nothing for {silence:.0f} s; the engine ends with it."))
            if peer.lost_at is not None and now - peer.lost_at > patience.others_s:
                self._blame(RankFailed(f"{peer}: {peer.lost_text}"))
        calls, since = self._waits()
        if since is not None and now - since > patience.waited_s:
            behind = min(self.peers, key=lambda peer: peer.calls)
            who = f"{behind} is too slow" if behind.calls < calls else "The ranks wait for each other"
            self._blame(
                RankFailed(
                    f"{who}: sum {calls} has taken {now - since:.0f} s, in step {behind.number}; the engine ends."
                )
            )

    def _blame(self, error: MicroscaleError) -> None:
        with self._changed:
            if self._fault is not None or self._closed:
                return
            self._fault = error
            self._changed.notify_all()
        for peer in self.peers:
            peer.kill()
