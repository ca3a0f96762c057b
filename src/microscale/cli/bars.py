"""Progress bars on standard error. Apart from the console: a command without one does not wait for their import."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

from microscale.cli.console import err


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
