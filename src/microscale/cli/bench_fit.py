"""``microscale bench fit``: how well the rows that were measured predict rows that were left out."""

from __future__ import annotations

from typing import Annotated

import typer

from microscale import hardware, settings
from microscale.bench import fit
from microscale.cli.console import err
from microscale.hardware import whole_models


def bench_fit(
    gpu: Annotated[str, typer.Option(help="A card whose family was measured.")] = "h200",
    write: Annotated[
        bool, typer.Option("--write", help="Bring the sums of kernels in the file of whole models up to date.")
    ] = False,
) -> None:
    """Fit the two-part model to the measured rows and say how far rows that are left out lie from it. Needs no GPU."""
    settings.load()
    family = hardware.known(gpu).family
    file = whole_models.file_of(family.name)
    if write:
        file.write_text(fit.recounted(whole_models.read(file)).to_json())
        err.print(f"Wrote {file}", soft_wrap=True)
    print("\n".join(fit.report(family, file)))
