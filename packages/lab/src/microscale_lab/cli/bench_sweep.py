"""``microscale bench sweep``: rows of whole models, for predictions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from microscale import settings
from microscale.cli.console import err
from microscale.errors import BadSetting, Unsupported
from microscale_lab.cli.played import AsOption, played_card

MEASURED = "microscale bench sweep"


def bench_sweep(
    model: Annotated[str, typer.Argument(help="A preset: gpt-oss-20b, gpt-oss-120b, gemma-4-26b-a4b.")] = "gpt-oss-20b",
    precision: Annotated[str, typer.Option(help="With commas.")] = "exact,balanced,fast",
    minutes: Annotated[float, typer.Option(help="Stop after this long; a second call goes on.")] = 6.0,
    output: Annotated[Path, typer.Option("-o", "--output", help="Rows so far, and where they go.")] = Path(
        "sweep.json"
    ),
    record: Annotated[bool, typer.Option("--record", help="Store the rows for predictions.")] = False,
    directory: Annotated[
        Path | None, typer.Option(help="With --record: write to this folder instead of the package.")
    ] = None,
    card: AsOption = None,
    sms: Annotated[int | None, typer.Option(help="Run on so many SMs only, as a smaller card has.")] = None,
) -> None:
    """Measure a model with random weights over precisions, batch sizes, contexts and prompts.

    Rows are kept in --output as they come, and what is there is not measured again.
    """
    from microscale import hardware
    from microscale.planning.precision import PRECISIONS
    from microscale_lab.kernel_bench import dense
    from microscale_lab.kernel_bench.timing import measure_read
    from microscale_lab.predict import sweep
    from microscale_lab.predict.fewer_sms import fewer_sms

    settings.load()
    wanted = precision.split(",")
    for name in wanted:
        if name not in PRECISIONS:
            raise BadSetting(f"--precision {name}: there is {', '.join(PRECISIONS)}.")
    if record and (card is not None or sms is not None):
        raise BadSetting("--record keeps times of the card itself; with --as or --sms they are a stand-in's.")
    here = hardware.present()
    if here.is_cpu:
        raise Unsupported("bench sweep measures a GPU, and there is none here.")
    rows = sweep.read(output)
    played: sweep.PlayedAs | None = None
    with fewer_sms(sms) as seen, played_card(card) as label:
        if label is not None or seen is not None:
            read_gbs = measure_read()
            streamed = None if seen is None else round(dense.streamed_gbs(), 1)
            played = sweep.PlayedAs(card, seen, round(read_gbs, 1), streamed)
            reads = f"{read_gbs:.0f} GB/s" + ("" if streamed is None else f", an lm_head {streamed:.0f}")
            err.print(f"a stand-in: {label or 'its own kernels'}, on {seen or 'all'} SMs, which read {reads}")
        until = time.monotonic() + 60 * minutes
        for row in sweep.run(model, wanted, rows, until, err.print):
            rows.append(row)
            sweep.write(output, here, rows, played)
            case = row.case
            print(f"{case.precision:<9} {case.kind:<8} {case.batch:>3} x {case.context:<6} {row.us:>10.1f} us")
    if record:
        err.print(f"Wrote {sweep.record(rows, here, MEASURED, directory)}", soft_wrap=True)
