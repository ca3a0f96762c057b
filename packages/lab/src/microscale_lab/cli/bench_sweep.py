"""``microscale bench sweep``: measure whole models, for predictions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from microscale import settings
from microscale.cli.console import err
from microscale.cli.help import measurement_option, output_option, precision_option
from microscale.errors import BadSetting, Unsupported

MEASURED = "microscale bench sweep"


def bench_sweep(
    model: Annotated[str, typer.Argument(help="A preset: gpt-oss-20b, gpt-oss-120b, gemma-4-26b-a4b.")] = "gpt-oss-20b",
    precision: Annotated[str, precision_option(help="Comma-separated precisions.")] = "exact,balanced,fast",
    minutes: Annotated[float, measurement_option(help="Stop after this many minutes. A second call continues.")] = 6.0,
    output: Annotated[
        Path, output_option("-o", "--output", help="File of rows; rows that it already has are not measured again.")
    ] = Path("sweep.json"),
    record: Annotated[bool, output_option("--record", help="Keep the rows for predictions.")] = False,
    directory: Annotated[Path | None, output_option(help="--record: write here instead of into the package.")] = None,
) -> None:
    """Measure a model with random weights over precisions, batch sizes, contexts and prompts."""
    from microscale import hardware
    from microscale.planning.precision import PRECISIONS
    from microscale_lab.predict import sweep

    settings.load()
    precisions = precision.split(",")
    for name in precisions:
        if name not in PRECISIONS:
            raise BadSetting(f"--precision {name}: the precisions are {', '.join(PRECISIONS)}.")
    gpu = hardware.present()
    if gpu.is_cpu:
        raise Unsupported("bench sweep needs a GPU, and this machine has none.")
    rows = sweep.read(output)
    until = time.monotonic() + 60 * minutes
    for row in sweep.run(model, precisions, rows, until, err.print):
        rows.append(row)
        sweep.write(output, gpu, rows)
        case = row.case
        print(f"{case.precision:<9} {case.kind:<8} {case.batch:>3} x {case.context:<6} {row.us:>10.1f} us")
    if record:
        err.print(f"Wrote {sweep.record(rows, gpu, MEASURED, directory)}", soft_wrap=True)
