"""The engine process as its owner starts it, waits for its end, and kills it.

It can be started ahead: its imports take seconds, in which the owner imports, reads options and loads its tokenizer.
Where the owner writes to a terminal, such a process gets one of its own, whose lines the owner shows beside its bar.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import termios
import tty
from collections.abc import Sequence
from typing import NamedTuple

COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "microscale.engine.process")
"""``-P``: a file of the current directory never stands in for a module."""


class Terminal(NamedTuple):
    """A new one: our end, the end to write to, and its name."""

    ours: int
    theirs: int
    name: str


def open_terminal() -> Terminal | None:
    """A terminal, where the system gives one. Bytes go through as they are: whoever shows them makes line ends."""
    try:
        ours, theirs = os.openpty()
        tty.setraw(theirs)
        return Terminal(ours, theirs, os.ttyname(theirs))
    except (OSError, termios.error):
        return None


class Child:
    """A process and our end of the socket to it. It ends when that is closed."""

    def __init__(self, command: Sequence[str], terminal: Terminal | None = None) -> None:
        """Run ``command --fd N`` with one end of a socket pair as file N: nobody else can connect. ``terminal``: what
        it writes to; our standard error without."""
        self.terminal = terminal
        output = 2 if terminal is None else terminal.theirs
        self.sock, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [*command, "--fd", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=output,  # what a library prints there is no answer of ours
                    stderr=None if terminal is None else output,
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
        _ahead = Child(COMMAND, open_terminal() if os.isatty(2) else None)


def terminal_ahead(command: Sequence[str]) -> Terminal | None:
    """What the process writes to that ``take`` would give for ``command``, if that was started ahead in a terminal."""
    return _ahead.terminal if _ahead is not None and tuple(command) == COMMAND else None


def take(command: Sequence[str]) -> Child:
    """A new process, or the one that was started ahead. That ends if another was wanted."""
    global _ahead
    if _ahead is not None and tuple(command) == COMMAND:
        child, _ahead = _ahead, None
        return child
    end_ahead()
    return Child(command)


def end_ahead() -> None:
    """The process that was started ahead is not wanted, unless it was taken."""
    global _ahead
    if _ahead is not None:
        _ahead.sock.close()  # upon which it ends
        _ahead = None
