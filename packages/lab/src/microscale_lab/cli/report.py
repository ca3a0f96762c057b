"""``microscale report``: results of this card, in two files to send."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from microscale import settings
from microscale.cli.console import err, out
from microscale.cli.help import measurement_option, model_option, output_option
from microscale.errors import BadSetting


def report(
    output: Annotated[
        Path, output_option("-o", "--output", help="The JSON file. A page with the suffix .md goes next to it.")
    ] = Path("microscale-report.json"),
    gpu: Annotated[
        str | None,
        model_option(help="On a machine without a GPU: execute this card's kernels on the CPU, without timing."),
    ] = None,
    quick: Annotated[
        bool, measurement_option("--quick", help="Execute only a few cases that cover every kernel function.")
    ] = False,
    op: Annotated[
        str | None, measurement_option(help="Execute only the kernels of these ops (comma-separated).")
    ] = None,
    adopt: Annotated[
        Path | None, output_option(help="Write the rows of a report that was sent into the package.")
    ] = None,
    directory: Annotated[Path | None, output_option(help="--adopt: write here instead of into the package.")] = None,
    readme: Annotated[Path | None, output_option(help="--adopt: add the card to this page's table.")] = None,
) -> None:
    """Check and time every kernel on this machine's GPU, and write a report to send to the developers.

    About twenty minutes on a GPU. The files contain no names, paths or serial numbers. Read them before you send them.
    """
    from microscale import hardware
    from microscale_lab.report import adopt as adoption
    from microscale_lab.report import card_report
    from microscale_lab.report.card_page import page

    env = settings.load()
    if adopt is not None:
        done = adoption.adopt(adopt, readme, directory)
        for file in (done.measured, done.models, done.readme):
            if file is not None:
                out.print(f"Wrote {file}", soft_wrap=True)
        return
    here = hardware.present()
    if here.is_cpu and gpu is None:
        raise BadSetting("There is no GPU here; --gpu NAME executes a card's kernels on the CPU, and times nothing.")
    if not here.is_cpu and gpu is not None:
        raise BadSetting(f"--gpu is for machines without a GPU, and this one has {here.name}.")
    asked = card_report.ReportScope(
        gpu=here if gpu is None else hardware.known(gpu),
        on_gpu=gpu is None,
        quick=quick,
        ops=tuple(op.split(",")) if op else (),
        cache_dir=env.cache_dir,
    )
    found = card_report.make(asked, err.print)
    output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    output.with_suffix(".md").write_text(page(found), encoding="utf-8")
    out.print(f"Wrote {output} and {output.with_suffix('.md')}", soft_wrap=True)
    raise typer.Exit(1 if found["kernels"]["failed"] else 0)
