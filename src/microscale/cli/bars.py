"""Progress bars on standard error. Apart from ``console``, whose importers need not wait for these."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from microscale.engine.loading.prepare import Prepared
    from microscale.models.families import AnyModel
    from microscale.models.recorded import Wanted


class Amount(ProgressColumn):
    """Bytes with their speed, or a plain count of something else, by the task's field ``unit``."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes, self._speed = DownloadColumn(), TransferSpeedColumn()

    def render(self, task: Task) -> Text:
        if task.fields["unit"] == "bytes":
            return Text.assemble(self._bytes.render(task), " ", self._speed.render(task))
        return Text(f"{int(task.completed)}/{int(task.total or 0)} {task.fields['unit']}", style="progress.download")


@contextmanager
def loading_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar in GB and GB/s, or in kernels. Yields a function that takes (done, total, unit)."""
    progress = _progress(Amount())
    task = progress.add_task(title, start=False, unit="")

    def show(done: int, total: int, unit: str) -> None:
        if progress.tasks[0].fields["unit"] != unit:
            progress.reset(task, total=total, completed=done, unit=unit)
            progress.start()
        progress.update(task, total=total, completed=done)

    try:
        yield show
    finally:
        progress.stop()


def _progress(amount: ProgressColumn) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeElapsedColumn())
    # Standard output appears above the bar, unless it goes to a file.
    redirect = sys.stdout.isatty()
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal, redirect_stdout=redirect)


@contextmanager
def progress_bar(title: str) -> Iterator[tuple[Callable[[int | None], None], Callable[[int], None]]]:
    """A progress bar on standard error that goes away when the work is done. Without a terminal there is none.

    Yields two functions: one starts the bar with a total (``None`` if it is unknown), one advances it. The bar starts
    late because the hub shows its own bar on standard error during a download.
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


def load_with_progress(prepared: Prepared, wanted: Wanted | None = None) -> AnyModel:
    """Load a model and make its kernels ready at the same time, with a progress bar.

    ``wanted``: what will be run. By default greedy steps as large as the workload has them.
    """
    from microscale.engine.loading.load import load
    from microscale.engine.loading.warming import kernels_ready
    from microscale.models.recorded import Wanted

    workload = prepared.memory.workload
    wanted = wanted or Wanted(workload.step_tokens, workload.sequences)
    with loading_bar(f"Loading {prepared.options.model}") as show:

        def on_kernels(done: int, total: int) -> None:
            if total:
                show(done, total, "kernels")

        with kernels_ready(prepared, None, on_kernels, wanted):
            return load(prepared, lambda done, total: show(done, total, "bytes"))
