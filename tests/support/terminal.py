"""A program in a terminal of its own: keys in, screen out, Ctrl-C as a user presses it."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).parents[1]
PATIENCE_S = 60.0
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b-\x1f]")
_TOKENS = re.compile(r"\x1b\[([0-?]*)[ -/]*([@-~])|\x1b\][^\x07]*\x07|([\r\n])|([^\x1b\r\n]+)")
# The terminal must be the program's own for Ctrl-C to reach it.
_SHIM = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


class Terminal:
    def __init__(self, process: subprocess.Popen[bytes], end: int) -> None:
        self.process = process
        self._end = end
        self._raw = b""
        self._seen = 0
        """Characters of the text that earlier waits have passed."""

    @property
    def text(self) -> str:
        """All that was printed, without colours and cursor movements."""
        return _ESCAPES.sub("", self.raw)

    @property
    def raw(self) -> str:
        """All that was printed, as it came."""
        return self._raw.decode(errors="replace")

    def type(self, line: str) -> None:
        os.write(self._end, line.encode() + b"\r")

    def paste(self, text: str) -> None:
        """Several lines at once, marked as terminals do (bracketed paste)."""
        sent = text.replace("\n", "\r")
        os.write(self._end, f"\x1b[200~{sent}\x1b[201~".encode())

    def press(self, letter: str) -> None:
        """Ctrl and a letter."""
        os.write(self._end, bytes([ord(letter.upper()) - 64]))

    def press_until(self, letter: str, pattern: str) -> None:
        """Press it again every few seconds, as a user does: a signal between readline's prompt and its wait for a key
        is noticed with the next key only."""
        for _ in range(10):
            self.press(letter)
            try:
                self.expect(pattern, 3.0)
                return
            except AssertionError:
                if self.process.poll() is not None:
                    raise
        raise AssertionError(f"{pattern!r} never came:\n{self.text[-3000:]}")

    def expect(self, pattern: str, patience_s: float = PATIENCE_S) -> re.Match[str]:
        """Wait for what was not there at the last ``expect``."""
        deadline = time.monotonic() + patience_s
        while True:
            if found := re.compile(pattern).search(self.text, self._seen):
                self._seen = found.end()
                return found
            if time.monotonic() > deadline or not self._read():
                raise AssertionError(f"{pattern!r} never came:\n{self.text[-3000:]}")

    def wait(self) -> int:
        deadline = time.monotonic() + PATIENCE_S
        while self._read():
            assert time.monotonic() < deadline, f"it does not end:\n{self.text[-3000:]}"
        return self.process.wait(PATIENCE_S)

    def _read(self) -> bool:
        """Take what came, or wait a moment; whether the program still writes."""
        if not select.select([self._end], [], [], 0.5)[0]:
            return self.process.poll() is None
        try:
            data = os.read(self._end, 65536)
        except OSError:  # the other end is closed
            return False
        self._raw += data
        return bool(data)


def drawn_lines(raw: str) -> tuple[list[str], set[str]]:
    """The lines that are left on the screen, and every state in which the cursor left one. None is broken."""
    lines = [""]
    drawn: set[str] = set()
    row = column = 0
    for token in _TOKENS.finditer(raw):
        number, control, move, text = token.groups()
        if move:
            drawn.add(lines[row])
        if move == "\r":
            column = 0
        elif move == "\n":
            row += 1
            lines += [""] * (row - len(lines) + 1)
        elif control == "A":
            row -= int(number or 1)
        elif control == "K" and number == "2":
            lines[row] = ""
        elif text:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + text + line[column + len(text) :]
            column += len(text)
    return [line.rstrip() for line in lines], drawn


@contextmanager
def terminal(command: Sequence[str], width: int = 100) -> Iterator[Terminal]:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    # The width is this terminal's, whatever the one is where the tests were started.
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    paths = [str(TESTS), *filter(None, [inherited.get("PYTHONPATH")])]
    env = inherited | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        [sys.executable, "-c", _SHIM, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=env,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
