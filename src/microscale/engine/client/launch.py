"""How the engine process is started, ended and waited for.

It can be started ahead: its imports take seconds, in which the owner imports, reads options and loads its tokenizer.
Where the owner writes to a terminal, such a process gets a terminal of its own, whose lines the owner shows above its
progress bar.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from microscale.engine.protocol.heartbeat import Heartbeat

COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "microscale.engine.process")
"""``-P``: a file of the current directory is never imported instead of a module."""


@dataclass(frozen=True)
class EngineProcess:
    """How the process is started, and how long it may load."""

    command: tuple[str, ...] = COMMAND
    load_timeout_s: float = 1800.0
    on_progress: Callable[[int, int], None] = lambda done, total: None
    """Called with the bytes of weights that are loaded, and their total."""
    on_kernels: Callable[[int, int], None] = lambda done, total: None
    """Called, after that, with the kernels that are compiled, and how many had to be."""


class Terminal(NamedTuple):
    """A pseudo-terminal: our end, the end to write to, and its name."""

    ours: int
    theirs: int
    name: str


def open_terminal() -> Terminal | None:
    """A new terminal; ``None`` where the system has none to give. Bytes go through unchanged, line ends included."""
    try:
        ours, theirs = os.openpty()
        tty.setraw(theirs)
        return Terminal(ours, theirs, os.ttyname(theirs))
    except (OSError, termios.error):
        return None


class Child:
    """A process and our end of the socket to it. The process ends when that socket is closed."""

    def __init__(self, command: Sequence[str], terminal: Terminal | None = None) -> None:
        """Run ``command --heartbeat M --fd N`` with a heartbeat's page as file M and one end of a socket pair as file
        N, so that no other process can connect. Its output goes to ``terminal``, or to our standard error."""
        self.terminal = terminal
        self.heartbeat = Heartbeat.create()
        output = 2 if terminal is None else terminal.theirs
        self.sock, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [*command, "--heartbeat", str(self.heartbeat.file), "--fd", str(theirs.fileno())],
                    pass_fds=(self.heartbeat.file, theirs.fileno()),
                    stdin=subprocess.DEVNULL,
                    stdout=output,  # libraries print there, and results of ours must not mix with it
                    stderr=None if terminal is None else output,
                    start_new_session=True,  # Ctrl-C reaches the owner alone, which then drains
                )
        except BaseException:
            self.sock.close()
            raise
        finally:
            self.heartbeat.close_file()

    @property
    def pid(self) -> int:
        return self._process.pid

    def status(self) -> int | None:
        """Its exit status; ``None`` while it runs."""
        return self._process.poll()

    async def wait(self) -> int:
        """Wait until it has ended; return its exit status."""
        if self.status() is None:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            # A pidfd is readable once its process has ended.
            file = os.pidfd_open(self.pid)
            loop.add_reader(file, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(file)
                os.close(file)
        return self._process.wait()

    def kill(self) -> None:
        """Kill the process and all that it has started: it leads a session of its own."""
        if self.status() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


_ahead: Child | None = None


def start_ahead() -> None:
    """Start an engine process, which the first ``take`` gets. It ends with this process if nothing takes it."""
    global _ahead
    with contextlib.suppress(OSError):  # ``take`` will raise it
        _ahead = Child(COMMAND, open_terminal() if os.isatty(2) else None)


def terminal_ahead(command: Sequence[str]) -> Terminal | None:
    """The terminal of the process that ``take`` would return for ``command``, if it was started ahead in one."""
    return _ahead.terminal if _ahead is not None and tuple(command) == COMMAND else None


def take(command: Sequence[str]) -> Child:
    """The process that was started ahead, if it runs this command; else a new one, and the other ends."""
    global _ahead
    if _ahead is not None and tuple(command) == COMMAND:
        child, _ahead = _ahead, None
        return child
    end_ahead()
    return Child(command)


def end_ahead() -> None:
    """End the process that was started ahead, unless it was taken."""
    global _ahead
    if _ahead is not None:
        _ahead.sock.close()  # upon which it ends
        _ahead = None
