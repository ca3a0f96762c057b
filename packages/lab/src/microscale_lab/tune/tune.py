"""``microscale tune``: measures tiles and thresholds on the present GPU and writes them, with where they come from, for
its family.

``hardware`` lists the candidates of each case. Each runs as a *trial*: the kernels are started as a model starts them,
and find the candidate where they would find a measured tile. The fastest whose answer is right is kept
(``tune_job``). Thresholds are where the faster of two ways changes (``tune_crossing``). What was found is in effect for
what is measured after it. Weights are random codes, so nothing is downloaded. The other ``tune_*`` have the cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from microscale.errors import BadSetting, Unsupported
from microscale.hardware import Gpu
from microscale.hardware.tiles import tuned
from microscale.hardware.tiles.tuned import Kernels, Section, TunedTile
from microscale_lab.kernel_bench import timing
from microscale_lab.tune import attention as tune_attention
from microscale_lab.tune import dense as tune_dense
from microscale_lab.tune import experts as tune_experts
from microscale_lab.tune import grouped as tune_grouped
from microscale_lab.tune import split_kv as tune_split_kv
from microscale_lab.tune import thresholds as tune_thresholds
from microscale_lab.tune import with_mlp as tune_with_mlp
from microscale_lab.tune.compiling import compiler_for
from microscale_lab.tune.job import Bench, Search, TimeUs

DEVICE = "cuda"
WITH_MLP = "experts_with_mlp"
"""Rows of ``small_batch_experts``, by a name of their own."""
JOBS: Mapping[str, Callable[[Gpu, bool], Iterable[Search]]] = {
    Kernels.GROUPED_GEMM: tune_grouped.jobs,
    Kernels.ATTENTION: tune_attention.jobs,
    Kernels.SPLIT_KV: tune_split_kv.jobs,
    Kernels.SMALL_BATCH_EXPERTS: tune_experts.jobs,
    WITH_MLP: tune_with_mlp.jobs,
    Kernels.SMALL_BATCH_DENSE: tune_dense.jobs,
    Kernels.THRESHOLDS: tune_thresholds.jobs,
}
"""What can be tuned, in this order: splits and thresholds are measured with the tiles that were found before."""


def parse_kernels(text: str | None) -> list[str]:
    """``attention,grouped_gemm`` as a list in the order of ``JOBS``; without it, all."""
    if text is None:
        return list(JOBS)
    names = [part.strip() for part in text.split(",")]
    unknown = [name for name in names if name not in JOBS]
    if unknown:
        raise BadSetting(f"--kernels: {unknown[0]!r} is not tuned; known are {', '.join(JOBS)}.")
    return [name for name in JOBS if name in names]


def tune(
    gpu: Gpu,
    directory: Path | None = None,
    *,
    kernels: Sequence[str] = tuple(JOBS),
    quick: bool = False,
    console: Console | None = None,
    time_us: TimeUs = timing.graph_us,
) -> Path:
    """Measure on the present GPU, write ``<family>.json`` into ``directory`` and return its path.

    The default directory is the one that kernels read. Cases that are not measured keep their earlier rows. The file is
    written after each of ``kernels``, so that a run that ends early keeps what it has. ``quick`` measures few tiles of
    few cases, which says that tuning works on this card, and not which tiles are best.
    """
    if gpu.is_cpu:
        raise Unsupported("Tuning needs a GPU; this machine has none that PyTorch can use.")
    if quick and directory is None:
        raise BadSetting("--quick measures few tiles: give --directory, so that they do not replace better ones.")
    file = (directory or tuned.TUNED_DIR) / f"{gpu.family.name}.json"
    compile_all = compiler_for(gpu)
    with _progress(console) as progress, ExitStack() as in_effect:
        for name in kernels:
            searches = [search.quick() if quick else search for search in JOBS[name](gpu, quick)]
            task = progress.add_task(name, total=sum(search.steps for search in searches))
            command = f"microscale tune --kernels {name}{' --quick' if quick else ''}"
            bench = Bench(gpu, time_us, command, compile_all, partial(progress.advance, task), DEVICE, quick)
            found: dict[Section[Any, Any], list[TunedTile[Any, Any]]] = {}
            for search in searches:
                found.setdefault(search.section, []).extend(search.rows(bench))
            for section, rows in found.items():
                # A key without a row was measured, and does not pay.
                gone = {key for search in searches for key in search.keys} - {row.key for row in rows}
                earlier = tuned.read(file, section, gpu.family) if file.exists() else {}
                tuned.write(file, gpu.family, {section: _merge(earlier, section, rows, gone)})
                now = _merge(tuned.measured(section, gpu.family), section, rows, gone)
                in_effect.enter_context(tuned.in_effect(section, gpu.family, now))
    tuned.forget()
    return file


def _merge(
    earlier: Mapping[Any, TunedTile[Any, Any]],
    section: Section[Any, Any],
    rows: list[TunedTile[Any, Any]],
    gone: set[Any],
) -> list[TunedTile[Any, Any]]:
    """The section with these rows in place of older ones of the same case, and without those that are gone."""
    if section.name is Kernels.GROUPED_GEMM:
        measured = {row.key.path for row in rows}
        return [row for row in earlier.values() if row.key.path not in measured] + tune_grouped.joined(rows)
    merged = [row for row in {**earlier, **{row.key: row for row in rows}}.values() if row.key not in gone]
    return sorted(merged, key=tune_experts.order) if section.name is Kernels.SMALL_BATCH_EXPERTS else merged


def _progress(console: Console | None) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)
