"""What the user types or pastes: one message, however many lines it has.

A terminal marks what is pasted (bracketed paste). GNU readline understands the marks and gives the paste as one text.
Without readline they arrive here. Where there are none (libedit, an old terminal), lines that arrive together are one
paste, since nobody types so fast; lines that were typed while an answer ran stay lines.
"""

from __future__ import annotations

import importlib
import select
import sys
from types import ModuleType

from rich.console import Console

readline: ModuleType | None
try:
    readline = importlib.import_module("readline")
except ImportError:  # a Python without it: the terminal's own editing has to do
    readline = None

BOLD, DIM, PLAIN = "\033[1;36m", "\033[2;36m", "\033[0m"
PASTE_BEGIN, PASTE_END = "\033[200~", "\033[201~"
MARKS_ON, MARKS_OFF = "\033[?2004h", "\033[?2004l"
TOGETHER_S = 0.03
"""Lines this close to each other were pasted. A terminal sends a paste at once; over ssh it may be several packets."""


class Entry:
    """Reads messages from standard input, with prompts where that is a terminal."""

    def __init__(self, console: Console) -> None:
        self._terminal = console.is_terminal and sys.stdin.isatty()
        self._marks = self._terminal and readline is None and not console.is_dumb_terminal
        """Whether we ask the terminal for marks ourselves."""
        if readline is not None and "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")  # off by default before version 8.1

    def read(self) -> str:
        """A message. A line that ends with a backslash goes on. Raises EOFError after the last."""
        text = self._line_or_paste(self._prompt(BOLD, "> "))
        while text.endswith("\\"):
            text = text[:-1] + "\n" + self._line_or_paste(self._prompt(DIM, "… "))
        return text

    def _line_or_paste(self, prompt: str) -> str:
        typed_ahead = self._waits(0.0)
        if self._marks:
            print(MARKS_ON, end="", flush=True)
        try:
            text = input(prompt)
            while text.count(PASTE_BEGIN) > text.count(PASTE_END):
                text += "\n" + input()
        finally:
            if self._marks:
                print(MARKS_OFF, end="", flush=True)
        if not typed_ahead:
            while self._waits(TOGETHER_S):
                text += "\n" + input()
        return text.replace(PASTE_BEGIN, "").replace(PASTE_END, "")

    def _waits(self, within_s: float) -> bool:
        """Whether more can be read already, or within a moment. Without a terminal a line is a message."""
        return self._terminal and bool(select.select([sys.stdin], [], [], within_s)[0])

    def _prompt(self, colour: str, text: str) -> str:
        if not self._terminal:
            return ""
        if readline is None:
            return f"{colour}{text}{PLAIN}"
        # Marks around what takes no room, so that line editing counts right.
        return f"\001{colour}\002{text}\001{PLAIN}\002"
