"""``microscale tune``: measures tiles on the present GPU and writes them, with where they come from, for its family.

``hardware`` lists the candidates of each case. Each runs as a *trial*: the kernels are started as a model starts them,
and find the candidate where they would find a measured tile. The fastest whose answer is right is kept. Weights are
random codes, so nothing is downloaded. ``tune_*`` have the cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from microscale.bench import timing, tune_attention, tune_dense, tune_experts, tune_grouped
from microscale.bench.tune_job import Job, Problem
from microscale.errors import BadSetting, MicroscaleError, Unsupported
from microscale.hardware import Gpu
from microscale.hardware.tiles import tuned
from microscale.hardware.tiles.tuned import Kernels, Measurement, Row, Section, trial

TimeUs = Callable[[Callable[[], object]], float]
JOBS: Mapping[Kernels, Callable[[Gpu, bool], Iterable[Job]]] = {
    Kernels.GROUPED_GEMM: tune_grouped.jobs,
    Kernels.ATTENTION: tune_attention.jobs,
    Kernels.SMALL_BATCH_EXPERTS: tune_experts.jobs,
    Kernels.SMALL_BATCH_DENSE: tune_dense.jobs,
}
"""What can be tuned; thresholds and split-KV are measured by hand."""
QUICK_TILES = 4
"""Candidates of a case that ``--quick`` measures: the one in use, and some from all over the list."""


def parse_kernels(text: str | None) -> list[Kernels]:
    """``attention,grouped_gemm`` as a list; without it, all."""
    if text is None:
        return list(JOBS)
    names = [part.strip() for part in text.split(",")]
    unknown = [name for name in names if name not in list(JOBS)]
    if unknown:
        raise BadSetting(f"--kernels: {unknown[0]!r} is not tuned; known are {', '.join(JOBS)}.")
    return [Kernels(name) for name in names]


def tune(
    gpu: Gpu,
    directory: Path | None = None,
    *,
    kernels: Sequence[Kernels] = tuple(JOBS),
    quick: bool = False,
    console: Console | None = None,
    time_us: TimeUs = timing.graph_us,
) -> Path:
    """Measure on the present GPU, write ``<family>.json`` into ``directory`` and return its path.

    The default directory is the one that kernels read. Cases that are not measured keep their earlier rows. ``quick``
    measures few tiles of few cases, which says that tuning works on this card, and not which tiles are best.
    """
    if gpu.is_cpu:
        raise Unsupported("Tuning needs a GPU; this machine has none that PyTorch can use.")
    if quick and directory is None:
        raise BadSetting("--quick measures few tiles: give --directory, so that they do not replace better ones.")
    file = (directory or tuned.TUNED_DIR) / f"{gpu.family.name}.json"
    found: dict[Section[Any, Any], list[Row[Any, Any]]] = {}
    with _progress(console) as progress:
        for name in kernels:
            jobs = [_some_tiles(job) if quick else job for job in JOBS[name](gpu, quick)]
            task = progress.add_task(name.value, total=sum(len(job.tiles) for job in jobs))
            for job in jobs:
                row = _best(job, gpu, time_us, partial(progress.advance, task))
                found.setdefault(job.section, []).append(row)
    tuned.write(file, gpu.family, {section: _merge(file, gpu, section, rows) for section, rows in found.items()})
    tuned.forget()
    return file


def _some_tiles(job: Job) -> Job:
    step = max(1, len(job.tiles) // QUICK_TILES)
    return replace(job, tiles=job.tiles[::step][:QUICK_TILES])


def _best(job: Job, gpu: Gpu, time_us: TimeUs, advance: Callable[[], None]) -> Row[Any, Any]:
    problem = job.prepare("cuda")
    timed = []
    for tile in job.tiles:
        with trial(job.section, gpu.family, job.key, tile):
            us = measure(problem, time_us)
        timed.append((us, tile))
        advance()
    us, tile = min(timed, key=lambda item: item[0])
    if us == float("inf"):
        raise MicroscaleError(f"No tile of {job.section.name} gave a right answer on {gpu.name}: {job.about}.")
    right = sorted(us for us, _ in timed if us < float("inf"))
    second = f"; the next {right[1]:.1f} us" if len(right) > 1 else ""
    run = f"microscale tune: {job.about}; the best of {len(right)} tiles{second}"
    today = datetime.now(UTC).date().isoformat()
    versions = (str(torch.__version__), str(triton.__version__))
    return Row(job.key, tile, Measurement(gpu.name, *versions, today, run, round(us, 2)))


def measure(problem: Problem, time_us: TimeUs) -> float:
    """Microseconds, or infinity where the answer is wrong or the kernel cannot be built or launched."""
    try:
        error = problem.error()
    except (OutOfResources, CompilationError, PTXASError):
        return float("inf")
    except RuntimeError as failure:
        # A pass of Triton's compiler, or the driver.
        if not any(text in str(failure) for text in ("PassManager", "too many resources")):
            raise
        return float("inf")
    # Not a number, too, is wrong.
    return time_us(problem.work) / problem.calls if error <= problem.max_error else float("inf")


def _merge(file: Path, gpu: Gpu, section: Section[Any, Any], rows: list[Row[Any, Any]]) -> list[Row[Any, Any]]:
    """The section with these rows in place of those that they stand for."""
    earlier = list(tuned.read(file, section, gpu.family).values()) if file.exists() else []
    if section.name is Kernels.GROUPED_GEMM:
        paths = {row.key.path for row in rows}
        return [row for row in earlier if row.key.path not in paths] + tune_grouped.joined(rows)
    fresh = {row.key: row for row in rows}
    merged = [fresh.pop(row.key, row) for row in earlier] + list(fresh.values())
    return sorted(merged, key=tune_experts.order) if section.name is Kernels.SMALL_BATCH_EXPERTS else merged


def _progress(console: Console | None) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)
