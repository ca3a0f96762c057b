"""Keeps the engine's log and our progress bar on separate lines of the terminal while a model loads.

Both write to one terminal, and a bar ends in the middle of a line. So the engine writes to a pty (its libraries show
downloads only in a terminal), and its output is copied here: whole lines above the bar while there is one, otherwise
as it comes.
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
"""How long to wait for the end of a line before showing the part so far. The bar must not start behind it."""
LAST_LINES_S = 2.0
"""How long to wait at the end for the engine's last output."""
ON_TERMINAL = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_NOCTTY)
os.dup2(fd, 1)
os.dup2(fd, 2)
os.close(fd)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Runs a command with its output on the terminal that the first argument names."""


@contextmanager
def engine_in_terminal(title: str, launch: EngineProcess) -> Iterator[tuple[EngineProcess, Callable[[], None]]]:
    """Yield how to start the engine so that a bar shows its loading, and a function that removes the bar."""
    with ExitStack() as closing, ExitStack() as loading:
        bar = _Bar(loading.enter_context(loading_bar(title)))
        command = launch.command
        pty = terminal_ahead(command)  # if the engine is already running
        if pty is not None:
            closing.enter_context(_copied(pty, bar))
            closing.callback(end_ahead)  # if it was not used, or we would wait for its last line
        elif err.is_terminal and (pty := open_terminal()) is not None:
            closing.enter_context(_copied(pty, bar))
            command = (sys.executable, "-I", "-S", "-c", ON_TERMINAL, pty.name, *command)

        def end() -> None:
            with bar.lock:
                loading.close()
                bar.drawn = False

        yield replace(launch, command=command, on_progress=bar.on_progress, on_kernels=bar.on_kernels), end


class _Bar:
    """Shows how many bytes are loaded, then how many kernels are compiled. It appears with the first number."""

    def __init__(self, show: Callable[[int, int, str], None]) -> None:
        self._draw = show
        self.drawn = False
        self.lock = threading.Lock()
        """Held while the bar starts or ends, and while text is written whose place depends on the bar."""

    def on_progress(self, done: int, total: int) -> None:
        self._show(done, total, "bytes")

    def on_kernels(self, done: int, total: int) -> None:
        self._show(done, total, "kernels")

    def _show(self, done: int, total: int, unit: str) -> None:
        if self.drawn:
            self._draw(done, total, unit)
            return
        with self.lock:
            self.drawn = True
            self._draw(done, total, unit)


@contextmanager
def _copied(pty: Terminal, bar: _Bar) -> Iterator[None]:
    """Copy what is written to the pty to our terminal."""
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
    begun = ""  # an unfinished line
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
    """Write the finished lines of a text, with ``unfinished`` the last one too. Return the rest."""
    with bar.lock:
        if bar.drawn:
            *lines, begun = text.split("\n")
            if lines:
                # A line that was overwritten with carriage returns: keep its last version.
                shown = (line.rstrip("\r").rpartition("\r")[2] for line in lines)
                err.print(Text.from_ansi("\n".join(shown)))
            return begun
        end = len(text) if unfinished else max(text.rfind("\n"), text.rfind("\r")) + 1
        _write(text[:end])
        return text[end:]


def _read(source: int) -> bytes:
    """The next bytes; empty at the end."""
    try:
        return os.read(source, 65536)
    except OSError:  # the last writer is gone
        return b""


def _write(text: str) -> None:
    err.file.write(text)
    err.file.flush()
