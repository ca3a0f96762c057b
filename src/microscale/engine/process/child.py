"""The engine process as its owner starts it, waits for its end, and kills it.

It can be started ahead: its imports take seconds, in which the owner imports, reads options and loads its tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

COMMAND = (sys.executable, "-P", "-m", "microscale.engine.process")
"""``-P``: a file of the current directory never stands in for a module."""


class Child:
    """A process and our end of the socket to it. It ends when that is closed."""

    def __init__(self, command: Sequence[str]) -> None:
        """Run ``command --fd N`` with one end of a socket pair as file N: nobody else can connect."""
        self.sock, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [*command, "--fd", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what a library prints there is no answer of ours
                    start_new_session=True,  # Ctrl-C is for the owner, who then drains
                )
        except BaseException:
            self.sock.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def status(self) -> int | None:
        """How it ended, if it has."""
        return self._process.poll()

    async def wait(self) -> int:
        """Until it has ended; how."""
        if self.status() is None:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            # The file of a process can be read when that has ended.
            file = os.pidfd_open(self.pid)
            loop.add_reader(file, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(file)
                os.close(file)
        return self._process.wait()

    def kill(self) -> None:
        """End the process and all that it has started: it leads a session of its own."""
        if self.status() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


_ahead: Child | None = None


def start_ahead() -> None:
    """Start an engine process for whoever asks for the first one. It ends with this process if nobody does."""
    global _ahead
    with contextlib.suppress(OSError):  # who asks for it will be told
        _ahead = Child(COMMAND)


def take(command: Sequence[str]) -> Child:
    """A new process, or the one that was started ahead."""
    global _ahead
    if _ahead is None or tuple(command) != COMMAND:
        return Child(command)
    child, _ahead = _ahead, None
    return child
