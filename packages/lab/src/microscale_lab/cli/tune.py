"""``microscale tune``: tiles and thresholds of the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from microscale import settings
from microscale.cli.console import err, out
from microscale.cli.help import measurement_option, output_option


def tune(
    kernels: Annotated[
        str | None,
        measurement_option(
            help="Only these (comma-separated): grouped_gemm, attention, split_kv, small_batch_experts,"
            " experts_with_mlp, small_batch_dense, thresholds."
        ),
    ] = None,
    quick: Annotated[
        bool,
        measurement_option(
            help="Try a few tiles of a few cases, in two or three minutes, to see whether tuning works here."
        ),
    ] = False,
    directory: Annotated[Path | None, output_option(help="Write to this folder instead of the package.")] = None,
) -> None:
    """Measure the kernels' tiles and thresholds on this machine's GPU and write the file for its family.

    Each tile is checked against the reference before it is timed. Until a family is tuned, a rule that knows the card's
    shared memory, registers and bandwidth chooses the tiles. Compiling takes most of the time, on all cores.
    """
    from microscale import hardware
    from microscale_lab.tune.tune import parse_kernels
    from microscale_lab.tune.tune import tune as run_tune

    settings.load()
    written = run_tune(hardware.detect(), directory, kernels=parse_kernels(kernels), quick=quick, console=err)
    out.print(f"Wrote {written}", soft_wrap=True)
