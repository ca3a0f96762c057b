"""``microscale bench kernels``: times of single kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from microscale import settings
from microscale.cli.bars import progress_bar
from microscale.cli.console import err, parse_choice, parse_numbers, print_json
from microscale.cli.help import measurement_option, output_option, precision_option
from microscale_lab.cli.played import AsOption, labelled, played_card


def bench_kernels(
    op: Annotated[str, typer.Argument(help="moe, dense, formats, attention, small or sampling.")] = "moe",
    model: Annotated[
        str | None,
        measurement_option(help="moe, formats: the layer of gpt-oss-120b, gemma-4-26b-a4b … or 256-experts."),
    ] = None,
    activations: Annotated[str, precision_option(help="moe: bf16, or mxfp8 for 8-bit kernels.")] = "bf16",
    weight_format: Annotated[
        str | None,
        precision_option(
            "--format",
            help="moe, dense: the weights' format; else a model's own. formats: several, such as mxfp4,nvfp4.",
        ),
    ] = None,
    tokens: Annotated[str | None, measurement_option(help="Token counts, such as 1,8,64.")] = None,
    card: AsOption = None,
    record: Annotated[bool, output_option(help="Store the rows for estimates of this card's family.")] = False,
    directory: Annotated[
        Path | None, output_option(help="With --record: write to this folder instead of the package.")
    ] = None,
    as_json: Annotated[bool, output_option("--json", help="Print one object per row as JSON.")] = False,
) -> None:
    """Time kernels on this machine's GPU, against the ceilings that it measures on the same card.

    Every row is checked against the reference first; a wrong kernel has no figure. ``formats`` prints expert and dense
    layers in several weight formats next to each other.
    """
    import torch
    import triton

    from microscale import hardware
    from microscale.kernels.op import Activations
    from microscale_lab.kernel_bench import formats, kernels
    from microscale_lab.kernel_bench import rows as bench_rows
    from microscale_lab.predict.record import record as record_rows

    settings.load()
    bench = parse_choice("OP", op, kernels.KernelBench)
    kind = parse_choice("--activations", activations, Activations)
    rows = []
    with played_card(card) as label, progress_bar(f"Timing {op}") as (start, advance):
        start(None)
        counts = None if tokens is None else parse_numbers("--tokens", tokens)
        for row in kernels.run(bench, model, counts, kind, weight_format):
            rows.append(row)
            advance(1)
    gpu = hardware.detect()
    if as_json:
        print_json(labelled(bench_rows.as_json(rows), label))
    else:
        print(f"{label or gpu.name}, torch {torch.__version__}, triton {triton.__version__}: {op}")
        print((formats.side_by_side if bench is kernels.KernelBench.FORMATS else bench_rows.table)(rows))
    if record:
        err.print(f"Wrote {record_rows(rows, gpu, directory, card)}", soft_wrap=True)
