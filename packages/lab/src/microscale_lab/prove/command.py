"""What ``microscale prove`` does with its options."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import triton
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from microscale.errors import BadSetting, Unsupported
from microscale.hardware import PROVED_BY, REPRESENTATIVES, known
from microscale.kernels.compiling.pool import usable_cores
from microscale.planning import registry
from microscale_lab.markdown import write_section
from microscale_lab.prove import executed_report
from microscale_lab.prove.execute import cuda_device, execute
from microscale_lab.prove.executed_report import print_end, print_rows, rows_of
from microscale_lab.prove.inventory import recorded
from microscale_lab.prove.mutation import as_markdown as mutants_as_markdown
from microscale_lab.prove.mutation import measure
from microscale_lab.prove.report import as_json, as_markdown, print_tables, summary
from microscale_lab.prove.run import ProofRow, Source, prove
from microscale_lab.prove.selection import CPU, CUDA, cases_of, select, shorten
from ptxproof import Edit

OPS = (*dict.fromkeys(entry.op for entry in registry.IMPLEMENTATIONS), "sums", "drafts")


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
    _check(op, jobs)
    rows = _prove_with_bar(source, gpu, op, jobs, cache_dir)
    if not rows:
        raise Unsupported(f"There is no kernel to prove for {op or 'any op'} on GPU {gpu}.")
    if markdown is not None:
        write_section(markdown, f"proof with Triton {triton.__version__}", as_markdown(rows))
    if json_output:
        console.out(as_json(rows), highlight=False)
    elif markdown is not None:
        console.out(summary(rows), highlight=False)
    else:
        print_tables(rows, console)
        if gpu == "all":
            console.out("\n".join(proved_by_lines()), highlight=False)
    return 0 if all(row.ok for row in rows) else 1


def run_cases(
    *,
    gpu: str = "all",
    op: str | None = None,
    device: str | None = None,
    jobs: int | None = None,
    quick: bool = False,
    cache_dir: Path | None = None,
    edit: Edit | None = None,
    json_output: bool = False,
    console: Console | None = None,
) -> int:
    """Execute the case tables as ``gpu``, report on ``console``, and give the exit status: 1 when a case failed.

    ``device`` is ``cuda`` or ``cpu``; by default CUDA's where there is one. ``quick``: as few cases as start every jit
    function in every form of its weights, by every variant. ``edit`` changes PTX before it runs.
    """
    console = console or _console()
    _check(op, jobs)
    if device not in (None, CPU, CUDA):
        raise BadSetting(f"--device {device}: cases run on {CUDA} or on {CPU}.")
    present = cuda_device() if device != CPU else None
    if device == CUDA and present is None:
        raise Unsupported("--device cuda: there is no CUDA device here; --device cpu interprets the kernels instead.")
    where = CPU if present is None else CUDA
    cards = [known(name) for name in (REPRESENTATIVES if gpu == "all" else [gpu])]
    with _bar() as show:
        selected = select(cards, cases_of([op] if op else []), where, progress=show)
        selected = shorten(selected) if quick else selected
        executed = execute(selected, device=where, jobs=jobs, cache_dir=cache_dir, edit=edit, progress=show)
    rows = rows_of(executed, present or CPU)
    if not rows:
        raise Unsupported(f"There is no case of {op or 'any op'} to execute as GPU {gpu}.")
    if json_output:
        console.out(executed_report.as_json(rows), highlight=False)
        print_end(rows, selected, Console(stderr=True))
    else:
        print_rows(rows, console)
        print_end(rows, selected, console)
    return 1 if any(row.failed for row in rows) else 0


def proved_by_lines() -> Iterator[str]:
    """Which cards were not proved by themselves, and by which others they are covered."""
    covered: dict[tuple[str, ...], list[str]] = {}
    for name, others in PROVED_BY.items():
        covered.setdefault(others, []).append(known(name).name)
    for others, names in covered.items():
        proved = " or ".join(known(other).name for other in others)
        yield f"{', '.join(names)}: not compiled separately. Every kernel that they start is one of {proved}."


def run_mutants(
    results: Path,
    *,
    gpu: str,
    op: str | None = None,
    sample: int,
    seed: int,
    quick: bool = False,
    host: bool = False,
    jobs: int | None = None,
    cache_dir: Path | None = None,
    console: Console | None = None,
) -> int:
    """Try a sample of the mutants of a card's kernels, and print which of them the cases notice. ``quick``: those of
    ``--quick`` alone; a later run tries the others on what they left alive. ``host``: mutants of the code that packs
    weights and launches kernels."""
    _check(op, jobs)
    if gpu == "all":
        raise BadSetting("--mutate takes one card: give --gpu gb10, for example.")
    if sample < 1:
        raise BadSetting(f"--sample {sample}: at least one mutant is needed.")
    with _bar() as show:
        found = measure(
            known(gpu), [op] if op else [], results, sample=sample, seed=seed, quick=quick,
            host=host, jobs=jobs or usable_cores(), cache_dir=cache_dir, progress=show,
        )  # fmt: skip
    if not found:
        raise Unsupported(f"There is no kernel of {op or 'any op'} to change on GPU {gpu}.")
    (console or _console()).out(mutants_as_markdown(found), highlight=False)
    return 0


def _check(op: str | None, jobs: int | None) -> None:
    if jobs is not None and jobs < 1:
        raise BadSetting(f"--jobs {jobs}: at least one process is needed.")
    if op is not None and op not in OPS:
        raise BadSetting(f"--op {op}: there is no such op; the ops are {', '.join(OPS)}.")


def _console() -> Console:
    # Rich takes a pipe for 80 columns, which breaks the names of the kernels.
    return Console() if Console().is_terminal else Console(width=120)


def _prove_with_bar(
    source: Source, gpu: str, op: str | None, jobs: int | None, cache_dir: Path | None
) -> list[ProofRow]:
    with _bar() as show:
        return prove(
            source,
            "all" if gpu == "all" else [gpu],
            ops=[op] if op else [],
            jobs=jobs,
            cache_dir=cache_dir,
            progress=partial(show, "compiling"),
        )


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on the terminal, lines elsewhere; gives what moves it: what is being done, how far, and how far it goes."""
    errors = Console(stderr=True)
    if not errors.is_terminal:
        yield _plain_lines(errors)
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    # No refreshing thread: the work is forked, and a fork must not find a lock held by a thread.
    with Progress(*columns, console=errors, auto_refresh=False, transient=True) as progress:
        bar = progress.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            progress.update(bar, description=what, completed=done, total=total, refresh=True)

        yield show


SECONDS_PER_LINE = 10.0


def _plain_lines(errors: Console) -> Callable[[str, int, int], None]:
    """For a pipe or a log: a line when another step begins, when it ends, and every ten seconds."""
    shown, when = "", 0.0

    def show(what: str, done: int, total: int) -> None:
        nonlocal shown, when
        if what != shown or done == total or time.monotonic() >= when + SECONDS_PER_LINE:
            shown, when = what, time.monotonic()
            errors.out(f"{what}: {done} of {total}", highlight=False)

    return show
