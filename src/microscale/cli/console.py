"""What commands print with: standard output for results, standard error for progress, logs and errors."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from microscale.errors import BadSetting

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def print_wrapped(console: Console, text: str) -> None:
    """Markup that breaks between words in a terminal; elsewhere a paragraph is a line, for programs."""
    console.print(text, soft_wrap=not console.is_terminal)


def print_error(console: Console, text: str) -> None:
    print_wrapped(console, f"[bold red]error:[/] {escape(text)}")


class ConsoleLog(logging.Handler):
    """Our own log on standard error, plain."""

    def emit(self, record: logging.LogRecord) -> None:
        print_wrapped(err, escape(self.format(record)))


def show_log() -> None:
    """Show what the package logs: the plan in use, once, at start."""
    logger = logging.getLogger("microscale")
    logger.setLevel(logging.INFO)
    logger.handlers = [ConsoleLog()]


def print_json(value: Any) -> None:
    """JSON on standard output, plain, for programs."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


class Amount(ProgressColumn):
    """Bytes with their speed, or a plain count of something else: what the task's field ``unit`` says."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes, self._speed = DownloadColumn(), TransferSpeedColumn()

    def render(self, task: Task) -> Text:
        if task.fields["unit"] == "bytes":
            return Text.assemble(self._bytes.render(task), " ", self._speed.render(task))
        return Text(f"{int(task.completed)}/{int(task.total or 0)} {task.fields['unit']}", style="progress.download")


@contextmanager
def loading_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar in GB and GB/s. Gives a function that hears how many bytes, or kernels, of all are there."""
    progress = _progress(Amount())
    task = progress.add_task(title, start=False, unit="")

    def tell(done: int, total: int, unit: str) -> None:
        if progress.tasks[0].fields["unit"] != unit:
            progress.reset(task, total=total, completed=done, unit=unit)
            progress.start()
        progress.update(task, total=total, completed=done)

    try:
        yield tell
    finally:
        progress.stop()


def _progress(amount: ProgressColumn) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeElapsedColumn())
    # What is printed meanwhile appears above the bar, and in a file where standard output is one.
    redirect = sys.stdout.isatty()
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal, redirect_stdout=redirect)


@contextmanager
def progress_bar(title: str) -> Iterator[tuple[Callable[[int | None], None], Callable[[int], None]]]:
    """A progress bar on standard error that goes away when the work is done; none where that is no terminal.

    Gives two functions: one starts the bar with a total (``None``: nobody knows it), one advances it. Until it starts,
    standard error is free for others: the hub's own bar is shown there during a download.
    """
    progress = _progress(MofNCompleteColumn())
    task = progress.add_task(title, start=False)

    def start(total: int | None) -> None:
        progress.update(task, total=total)
        progress.start_task(task)
        progress.start()

    try:
        yield start, lambda steps: progress.advance(task, steps)
    finally:
        progress.stop()


def parse_numbers(option: str, text: str) -> list[int]:
    """``1,2,3`` as numbers."""
    if not re.fullmatch(r"\s*[0-9]{1,18}\s*(,\s*[0-9]{1,18}\s*)*", text, re.ASCII):
        raise BadSetting(f"{option} takes numbers with commas between them, such as 1,2,3, not {text[:80]!r}.")
    return [int(part) for part in text.split(",")]
