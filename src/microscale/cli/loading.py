"""A model that loads in the engine process, seen in a terminal: its log and our bar have lines of their own.

Both write to one terminal, and a bar ends in the middle of a line. So the engine writes to a terminal of its own (a
pty, for its libraries show their downloads only in one), and what it writes is copied here: whole lines above the bar
while that is drawn, else as it comes.
"""

from __future__ import annotations

import codecs
import os
import select
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from rich.text import Text

from microscale.cli.bars import loading_bar
from microscale.cli.console import err
from microscale.engine.client.launch import EngineProcess, Terminal, end_ahead, open_terminal, terminal_ahead

UNFINISHED_S = 0.05
"""How long we wait for the end of a line before a part of it is shown: the bar must not begin behind it."""
LAST_LINES_S = 2.0
"""How long we wait at the end for what the engine wrote last."""
ON_TERMINAL = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_NOCTTY)
os.dup2(fd, 1)
os.dup2(fd, 2)
os.close(fd)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs a command with the terminal that the first argument names for its output."""


@contextmanager
def engine_in_terminal(title: str, launch: EngineProcess) -> Iterator[tuple[EngineProcess, Callable[[], None]]]:
    """How to start the engine so that ``title`` has a bar while it loads, and a function that takes the bar away."""
    with ExitStack() as closing, ExitStack() as loading:
        bar = _Bar(loading.enter_context(loading_bar(title)))
        command = launch.command
        pty = terminal_ahead(command)  # of an engine that is running already
        if pty is not None:
            closing.enter_context(_copied(pty, bar))
            closing.callback(end_ahead)  # where it was not taken: its last line would be waited for
        elif err.is_terminal and (pty := open_terminal()) is not None:
            closing.enter_context(_copied(pty, bar))
            command = (sys.executable, "-I", "-S", "-c", ON_TERMINAL, pty.name, *command)

        def end() -> None:
            with bar.lock:
                loading.close()
                bar.drawn = False

        yield replace(launch, command=command, on_progress=bar.on_progress, on_kernels=bar.on_kernels), end


class _Bar:
    """The engine says how many bytes of all are there, then how many of the kernels that it still compiles; the bar is
    drawn from the first time on."""

    def __init__(self, tell: Callable[[int, int, str], None]) -> None:
        self._tell = tell
        self.drawn = False
        self.lock = threading.Lock()
        """Held by who begins or ends the bar, and by who writes something that goes by whether it is drawn."""

    def on_progress(self, done: int, total: int) -> None:
        self._show(done, total, "bytes")

    def on_kernels(self, done: int, total: int) -> None:
        self._show(done, total, "kernels")

    def _show(self, done: int, total: int, unit: str) -> None:
        if self.drawn:
            self._tell(done, total, unit)
            return
        with self.lock:
            self.drawn = True
            self._tell(done, total, unit)


@contextmanager
def _copied(pty: Terminal, bar: _Bar) -> Iterator[None]:
    """What is written to the terminal appears in ours."""
    termios.tcsetwinsize(pty.theirs, (err.height, err.width))
    copier = threading.Thread(target=_copy, args=(pty.ours, bar), daemon=True)
    copier.start()
    try:
        yield
    finally:
        os.close(pty.theirs)  # reading ends when the engine's end is closed too
        copier.join(LAST_LINES_S)


def _copy(source: int, bar: _Bar) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    begun = ""  # a line that has not ended
    while True:
        if begun and not bar.drawn and not select.select([source], [], [], UNFINISHED_S)[0]:
            begun = _show(begun, bar, unfinished=True)
        data = _read(source)
        if not data:
            break
        begun = _show(begun + decoder.decode(data), bar)
    _write(begun)
    os.close(source)


def _show(text: str, bar: _Bar, *, unfinished: bool = False) -> str:
    """Write the lines of a text that have ended, and the last one if that may be unfinished; what is left of it."""
    with bar.lock:
        if bar.drawn:
            *lines, begun = text.split("\n")
            if lines:
                # Of a line that was written over and over, the last.
                shown = (line.rstrip("\r").rpartition("\r")[2] for line in lines)
                err.print(Text.from_ansi("\n".join(shown)))
            return begun
        end = len(text) if unfinished else max(text.rfind("\n"), text.rfind("\r")) + 1
        _write(text[:end])
        return text[end:]


def _read(source: int) -> bytes:
    """What there is; nothing at the end."""
    try:
        return os.read(source, 65536)
    except OSError:  # the last who could write is gone
        return b""


def _write(text: str) -> None:
    err.file.write(text)
    err.file.flush()
