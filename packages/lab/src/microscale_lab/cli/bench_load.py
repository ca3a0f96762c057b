"""``microscale bench load``: how fast a checkpoint is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from microscale import settings
from microscale.cli.bars import progress_bar
from microscale.cli.console import print_json
from microscale.cli.help import device_option, measurement_option, model_option, output_option
from microscale.cli.options import BackendOption, DeviceOption, PrecisionOption
from microscale.errors import BadSetting

if TYPE_CHECKING:
    from microscale.models.reading.chunks import DiskReads


def bench_load(
    model: Annotated[str, typer.Argument(help="A checkpoint folder or a hub id; with --make a preset.")],
    make: Annotated[
        Path | None,
        model_option(help="First write random weights of the preset to this folder, in the published layout."),
    ] = None,
    layers: Annotated[
        int | None, model_option(help="With --make: number of layers. Default: the preset's.", min=1)
    ] = None,
    reads: Annotated[
        list[str] | None,
        device_option(help="Reads in flight and MiB of each, such as 2x8. Repeatable. Default: those of a load."),
    ] = None,
    repeats: Annotated[int, measurement_option(help="Runs per row; the median is shown.", min=1)] = 3,
    backend: BackendOption = None,
    precision: PrecisionOption = "exact",
    device: DeviceOption = "auto",
    as_json: Annotated[bool, output_option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Measure how fast a checkpoint loads, next to a raw read of the same files, and how much memory that takes.

    Without files: microscale bench load gpt-oss-20b --make /tmp/weights --layers 8
    """
    import torch

    from microscale.engine.config import EngineConfig
    from microscale.engine.loading.prepare import prepare
    from microscale_lab.model_bench import load as bench_loading
    from microscale_lab.model_bench.random_checkpoint import write_random_checkpoint

    env = settings.load()
    ways = [parse_reads(text) for text in reads or ()]
    if make is not None:
        overrides = {} if layers is None else {"num_hidden_layers": layers}
        with progress_bar(f"Writing {make}") as (start, _):
            start(None)
            write_random_checkpoint(model, make, overrides)
        model = str(make)
    elif layers is not None:
        raise BadSetting("--layers needs --make.")
    options = EngineConfig(
        model=model, device=device, backend=backend, precision=precision, max_num_seqs=1, offline=env.offline
    )
    prepared = prepare(options)
    result = bench_loading.run(prepared, repeats, ways)
    if as_json:
        print_json(bench_loading.as_json(result))
    else:
        print(f"{model} on {prepared.setup.gpu.name}, torch {torch.__version__}")
        print(bench_loading.table(result))


def parse_reads(text: str) -> DiskReads:
    """``2x8``: two reads in flight, of 8 MiB each."""
    from microscale.models.reading.chunks import MIB, DiskReads

    found = re.fullmatch(r"([1-9][0-9]?)x([1-9][0-9]{0,2})", text, re.ASCII)
    if found is None:
        raise BadSetting(f"--reads takes reads in flight and MiB of each, such as 2x8, not {text[:80]!r}.")
    return DiskReads(int(found[1]), int(found[2]) * MIB)
