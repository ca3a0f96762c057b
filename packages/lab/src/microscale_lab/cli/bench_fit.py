"""``microscale bench fit``: how well the rows that were measured predict rows that were left out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from microscale import settings
from microscale.cli.bars import progress_bar
from microscale.cli.console import err


def bench_fit(
    gpu: Annotated[str, typer.Option(help="A card whose family was measured.")] = "h200",
    write: Annotated[
        bool, typer.Option("--write", help="Bring the sums of kernels in the file of whole models up to date.")
    ] = False,
    write_table: Annotated[
        bool, typer.Option("--write-table", help="Write the table that explain predicts with (some minutes).")
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(help="Predict the rows of this sweep, which the fit has not seen: a stand-in's."),
    ] = None,
) -> None:
    """Fit the two-part model to the measured rows and say how far rows that are left out lie from it. Needs no GPU."""
    from microscale import hardware
    from microscale_lab.predict import fit, stand_in, table, whole_models

    settings.load()
    if against is not None:
        print("\n".join(stand_in.report(against)))
        return
    if write_table:
        with progress_bar("Predicting") as (start, advance):
            start(table.num_rows())
            file = table.write(lambda: advance(1))
        err.print(f"Wrote {file}", soft_wrap=True)
        return
    family = hardware.known(gpu).family
    file = whole_models.file_of(family.name)
    if write:
        file.write_text(fit.recounted(whole_models.read(file)).to_json())
        err.print(f"Wrote {file}", soft_wrap=True)
    print("\n".join(fit.report(family, file)))
