"""``microscale bench fit``: how well measured rows predict rows that were left out."""

from __future__ import annotations

from typing import Annotated

from microscale import settings
from microscale.cli.bars import progress_bar
from microscale.cli.console import err
from microscale.cli.help import model_option, output_option


def bench_fit(
    gpu: Annotated[str, model_option(help="A card of a family that was measured.")] = "h200",
    write: Annotated[
        bool, output_option("--write", help="Update the sums of kernel times in the file of whole models.")
    ] = False,
    write_table: Annotated[
        bool,
        output_option("--write-table", help="Write the table that explain reads. Takes some minutes."),
    ] = False,
) -> None:
    """Fit the time model to measured rows, and show how well it predicts rows that it has not seen. Needs no GPU."""
    from microscale import hardware
    from microscale_lab.predict import fit, table, whole_models

    settings.load()
    if write_table:
        with progress_bar("Predicting") as (start, advance):
            start(len(table.cases()))
            file = table.write(lambda: advance(1))
        err.print(f"Wrote {file}", soft_wrap=True)
        return
    family = hardware.known(gpu).family
    file = whole_models.file_of(family.name)
    if write:
        file.write_text(fit.recounted(whole_models.read(file)).to_json())
        err.print(f"Wrote {file}", soft_wrap=True)
    print("\n".join(fit.report(family, file)))
