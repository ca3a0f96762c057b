"""``microscale prove``: every kernel compiled, or executed, as cards that are not here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from microscale import settings
from microscale.cli.help import device_option, measurement_option, model_option, output_option
from microscale.errors import BadSetting


def prove(
    gpu: Annotated[
        str, model_option(help="A known card (rtx5090, gb10 …), or all: cards that between them start every kernel.")
    ] = "all",
    op: Annotated[str | None, measurement_option(help="Only this op: moe, attention …")] = None,
    jobs: Annotated[int | None, device_option(help="Number of processes. Default: one per core.")] = None,
    markdown: Annotated[
        Path | None, output_option(help="Rewrite the tables of this page for the installed Triton.")
    ] = None,
    as_json: Annotated[
        bool, output_option("--json", help="Print one row per kernel and architecture as JSON.")
    ] = False,
    run: Annotated[
        bool, measurement_option("--run", help="Execute the kernels on test cases, as on the card.")
    ] = False,
    device: Annotated[
        str | None, device_option(help="With --run: cuda, or cpu (interpreter). Default: cuda if there is a GPU.")
    ] = None,
    quick: Annotated[
        bool,
        measurement_option(
            "--quick",
            help="With --run or --mutate: only a few cases, which take every path and launch every function.",
        ),
    ] = False,
    mutate: Annotated[
        Path | None,
        measurement_option(
            help="Break kernels by one small change at a time, and count the changes that no case notices. One JSON "
            "line per change goes to this file; the next run goes on from there."
        ),
    ] = None,
    host: Annotated[
        bool, measurement_option("--host", help="With --mutate: change the code that packs weights and launches.")
    ] = False,
    sample: Annotated[int | None, measurement_option(help="With --mutate: number of changes. Default: 100.")] = None,
    seed: Annotated[int | None, measurement_option(help="With --mutate: seed of the sample. Default: 0.")] = None,
) -> None:
    """Compile every kernel for every architecture, without a GPU, and check it against the card's limits.

    It fails on a compile error, too much shared memory, spilled registers, an instruction that the card does not have,
    and a promised matrix instruction that is missing. Results are cached.

    With --run the kernels are executed as on the card, by the GPU at hand or by the CPU, and
    their results are compared with the float32 reference.
    """
    from microscale_lab.prove.command import run_cases, run_mutants, run_prove

    env = settings.load()
    if mutate is not None:
        if run or device is not None or markdown is not None or as_json:
            raise BadSetting("--mutate works with --gpu, --op, --host, --quick, --jobs, --sample and --seed only.")
        size = 100 if sample is None else sample
        raise typer.Exit(
            run_mutants(
                mutate,
                gpu=gpu,
                op=op,
                sample=size,
                seed=seed or 0,
                quick=quick,
                host=host,
                jobs=jobs,
                cache_dir=env.cache_dir,
            )
        )
    if sample is not None or seed is not None or host:
        raise BadSetting("--sample, --seed and --host need --mutate.")
    if not run and (device is not None or quick):
        raise BadSetting("--device needs --run, --quick needs --run or --mutate.")
    if run and markdown is not None:
        raise BadSetting("--markdown does not work with --run.")
    if run:
        raise typer.Exit(
            run_cases(
                gpu=gpu, op=op, device=device, jobs=jobs, quick=quick, cache_dir=env.cache_dir, json_output=as_json
            )
        )
    raise typer.Exit(
        run_prove(
            gpu=gpu,
            op=op,
            jobs=jobs,
            cache_dir=env.cache_dir,
            json_output=as_json,
            markdown=markdown,
        )
    )
