"""The processes of ranks other than 0: how they are started, here or on another machine, and how they end. Nothing here
imports torch."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from microscale.engine.ranks.messages import FromFollower, RankLink
from microscale.parallel.handshake import Nodes

COMMAND = (sys.executable, "-P", "-m", "microscale.engine.ranks")
"""``-P``: a file in the current directory must not shadow a module."""
END_S = 2.0
"""How long a rank has to end after it was asked to."""
EXIT_S = 5.0
"""How long to wait for the exit status of a process that has closed its connection."""
POLL_S = 0.2


@dataclass
class Peer:
    """Another rank, as rank 0 sees it."""

    rank: int
    link: RankLink
    process: subprocess.Popen[bytes] | None = None
    """``None``: it runs on another machine."""
    where: str = ""
    """The address of that machine."""
    heard_at: float = field(default_factory=time.monotonic)
    answers: deque[FromFollower] = field(default_factory=deque)
    has_prepared: bool = False

    def __str__(self) -> str:
        where = self.where if self.process is None else f"process {self.process.pid}"
        return f"Rank {self.rank} ({where})"

    def how_it_ended(self) -> str:
        """How its process ended, after its connection was closed."""
        if self.process is None:
            return "is gone: its connection was closed"
        try:
            status = self.process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return "has closed its connection"
        if status < 0:
            return f"was killed by signal {-status} ({signal.Signals(-status).name})"
        return f"ended with status {status}"

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
        else:
            with suppress(OSError):
                self.link.sock.shutdown(socket.SHUT_RDWR)  # a rank ends when it loses rank 0

    def close(self, deadline: float) -> None:
        """Wait until its process has ended, and kill it after ``deadline``."""
        if self.process is not None:
            _wait_or_kill(self.process, deadline)
        self.link.close()


def spawn(rank: int, command: Sequence[str] = COMMAND) -> Peer:
    """Start a rank on this machine, with one end of a socket pair: no other process can connect."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*command, "--fd", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=2,  # stdout belongs to rank 0's answers
        )
    return Peer(rank, RankLink(ours), process)


def run_node(model: str, world: int, nodes: Nodes, node_rank: int, gpu: str | None = None) -> int:
    """Run the ranks of a machine other than the first until they end. Returns the exit status; the ranks print what
    went wrong. ``gpu``: a GPU for them; by default rank 0 decides."""
    each = world // nodes.count
    arguments = ["--leader", nodes.address, str(nodes.port), "--secret-file", nodes.secret_file, "--model", model]
    if gpu is not None:
        arguments += ["--gpu", gpu]
    ranks = range(node_rank * each, (node_rank + 1) * each)
    commands = [[*COMMAND, *arguments, "--rank", str(rank)] for rank in ranks]
    running = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for command in commands]
    names = ", ".join(map(str, ranks))
    print(f"This machine runs rank {names} of {world} ranks.", file=sys.stderr, flush=True)
    deadline = 0.0
    try:
        while all(process.poll() is None for process in running):
            time.sleep(POLL_S)
        deadline = time.monotonic() + END_S  # one has ended, and the others end with it
    finally:
        statuses = [_wait_or_kill(process, deadline) for process in running]
    return max(statuses, key=abs)


def _wait_or_kill(process: subprocess.Popen[bytes], deadline: float) -> int:
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return 1
