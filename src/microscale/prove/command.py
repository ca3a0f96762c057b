"""What ``microscale prove`` does with its options."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from microscale.backends import registry
from microscale.errors import BadSetting, Unsupported
from microscale.prove.gate import Row
from microscale.prove.inventory import recorded
from microscale.prove.report import as_json, as_markdown, print_tables, summary, write_section
from microscale.prove.run import Source, prove

OPS = tuple(dict.fromkeys(entry.op for entry in registry.IMPLEMENTATIONS))


def run_prove(
    source: Source = recorded,
    *,
    gpu: str = "all",
    op: str | None = None,
    jobs: int | None = None,
    cache_dir: Path | None = None,
    json_output: bool = False,
    markdown: Path | None = None,
    console: Console | None = None,
) -> int:
    """Prove, report on ``console``, and give the exit status: 0 when every kernel passed, 1 when one was refused.

    ``gpu`` is a known card or ``all``; ``markdown`` is a page whose tables for this Triton version are rewritten.
    """
    console = console or _console()
    if jobs is not None and jobs < 1:
        raise BadSetting(f"--jobs {jobs}: at least one process is needed.")
    if op is not None and op not in OPS:
        raise BadSetting(f"--op {op}: there is no such op; the ops are {', '.join(OPS)}.")
    rows = _prove_with_bar(source, gpu, op, jobs, cache_dir)
    if not rows:
        raise Unsupported(f"There is no kernel to prove for {op or 'any op'} on GPU {gpu}.")
    if markdown is not None:
        write_section(markdown, as_markdown(rows))
    if json_output:
        console.out(as_json(rows), highlight=False)
    elif markdown is not None:
        console.out(summary(rows), highlight=False)
    else:
        print_tables(rows, console)
    return 0 if all(row.ok for row in rows) else 1


def _console() -> Console:
    # Rich takes a pipe for 80 columns, which breaks the names of the kernels.
    return Console() if Console().is_terminal else Console(width=120)


def _prove_with_bar(source: Source, gpu: str, op: str | None, jobs: int | None, cache_dir: Path | None) -> list[Row]:
    errors = Console(stderr=True)
    columns = TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    # No refreshing thread: the compilations are forked, and a fork must not find a lock held by a thread.
    with Progress(
        *columns, console=errors, auto_refresh=False, transient=True, disable=not errors.is_terminal
    ) as progress:
        bar = progress.add_task("compiling", total=None)

        def show(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total, refresh=True)

        return prove(
            source,
            "all" if gpu == "all" else [gpu],
            ops=[op] if op else [],
            jobs=jobs,
            cache_dir=cache_dir,
            progress=show,
        )
