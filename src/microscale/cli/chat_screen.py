"""How an answer looks in a terminal: reasoning dimmed or folded into a line, then Markdown as it comes.

Finished blocks are printed and stay; only the block that still grows is drawn again and again, so the terminal's own
history holds the whole answer. Without a terminal plain text goes out as it comes.
"""

from __future__ import annotations

import re
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.markup import escape
from rich.text import Text

from microscale.cli.chat_client import Answer

REFRESH = 12
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})", re.MULTILINE)
# All that could steer a terminal, but for line breaks and tabs.
_STEERING = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def clean(text: str) -> str:
    return text.translate(_STEERING)


def split_finished(text: str) -> int:
    """Where the block begins that may still grow: after the last empty line that is in no code."""
    at = text.rfind("\n\n")
    while at >= 0:
        if len(_FENCE.findall(text, 0, at)) % 2 == 0:
            return at + 2
        at = text.rfind("\n\n", 0, at)
    return 0


class AnswerView:
    """``with AnswerView(console, fold=False) as view: view.add(reasoning, content)``"""

    def __init__(self, console: Console, *, fold: bool) -> None:
        self._console = console
        self._fold = fold
        self._live: Live | None = None
        self._growing = ""
        self._reasoning = ""
        self._in_content = False

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=REFRESH, transient=True)
            self._live.start()
            self._live.update(Text("…", style="dim"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is None:
            self._console.print()
            return
        self._settle()

    def add(self, reasoning: str, content: str, answer: Answer) -> None:
        if self._live is None:
            self._console.print(clean(content), end="", soft_wrap=True, markup=False)
            return
        if reasoning:
            self._reason(clean(reasoning))
        if content:
            if not self._in_content:
                self._begin_content(answer)
            self._growing += clean(content)
            at = split_finished(self._growing)
            if at:
                self._live.console.print(Markdown(self._growing[:at]))
                self._growing = self._growing[at:]
            self._live.update(Markdown(self._growing))

    def _reason(self, text: str) -> None:
        assert self._live is not None
        self._reasoning += text
        if self._fold:
            last = self._reasoning.rstrip().rpartition("\n")[2]
            self._live.update(Text(f"thinking: {last[-60:]}", style="dim italic", overflow="ellipsis", no_wrap=True))
            return
        # Finished lines stay; the last one grows.
        done, _, self._reasoning = self._reasoning.rpartition("\n")
        if done:
            self._live.console.print(Text(done, style="dim"))
        self._live.update(Text(self._reasoning, style="dim"))

    def _begin_content(self, answer: Answer) -> None:
        assert self._live is not None
        self._in_content = True
        if self._fold and answer.reasoning:
            folded = f"thought for {answer.thought_s:.1f} s (/thoughts shows it)"
            self._live.console.print(Text(folded, style="dim italic"))
        elif self._reasoning:
            self._live.console.print(Text(self._reasoning, style="dim"))
        if answer.reasoning:
            self._live.console.print()
        self._reasoning = ""

    def _settle(self) -> None:
        """Leave on the screen what was still growing."""
        assert self._live is not None
        self._live.update(Text(""))
        self._live.stop()
        if self._growing:
            self._console.print(Markdown(self._growing))
        elif self._reasoning and not self._fold:
            self._console.print(Text(self._reasoning, style="dim"))


def summary(answer: Answer) -> str:
    """What is said under an answer."""
    parts = ["[yellow]stopped[/]"] if answer.stopped else []
    if answer.finish == "length":
        parts.append("[yellow]cut off: the most tokens were reached[/]")
    if answer.flaws:
        parts.append(f"[yellow]malformed: {escape(', '.join(answer.flaws))}[/]")
    parts.append(f"{answer.num_tokens} tokens")
    if answer.rate is not None:
        parts.append(f"{answer.rate:.1f} tok/s")
    if answer.first_s is not None:
        parts.append(f"first after {answer.first_s * 1e3:.0f} ms")
    return f"[dim]{' · '.join(parts)}[/]"
