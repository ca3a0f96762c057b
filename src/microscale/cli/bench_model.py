"""``microscale bench MODEL``: how fast a model is, from inside the engine."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from microscale import settings
from microscale.bench.cases import DEFAULT_TESTS, check_lengths, make_cases
from microscale.cli.bars import load_with_progress, progress_bar
from microscale.cli.console import parse_numbers, print_json, show_log
from microscale.cli.help import batching_option, measurement_option, output_option
from microscale.cli.options import (
    MODEL_HELP,
    DeviceOption,
    KvCacheDtypeOption,
    LayerFormatOption,
    LoadFormatOption,
    MoeActivationsOption,
    OverridesOption,
    PrecisionOption,
    ReserveOption,
    TensorParallelOption,
    ThreadsOption,
    UtilizationOption,
    YesOption,
    parse_overrides,
    reserve_in_bytes,
)
from microscale.engine.config import EngineConfig
from microscale.errors import BadSetting
from microscale.models.config import LoadFormat


def bench_model(
    model: Annotated[str, typer.Argument(help=f"{MODEL_HELP}.")] = "gpt-oss-20b",
    load_format: LoadFormatOption = LoadFormat.AUTO,
    tests: Annotated[
        str | None,
        measurement_option(
            help="ppN is a prompt of N tokens, tgN is N new tokens. "
            f"Default: {DEFAULT_TESTS}, without those that are longer than the model's context."
        ),
    ] = None,
    concurrency: Annotated[
        str, measurement_option(help="Numbers of sequences that decode together, such as 1,8,64.")
    ] = "1",
    depth: Annotated[str, measurement_option(help="Tokens of context before decoding, such as 128,8192.")] = "128",
    repeats: Annotated[int, measurement_option(help="Runs per row. The median is shown.", min=1)] = 3,
    precision: PrecisionOption = "exact",
    layer_format: LayerFormatOption = None,
    moe_activations: MoeActivationsOption = "auto",
    kv_cache_dtype: KvCacheDtypeOption = "auto",
    gpu_memory_utilization: UtilizationOption = 0.9,
    reserve_memory: ReserveOption = None,
    max_num_batched_tokens: Annotated[int, batching_option(help="Maximum number of tokens in one step.")] = 8192,
    hf_overrides: OverridesOption = None,
    device: DeviceOption = "auto",
    yes: YesOption = False,
    threads: ThreadsOption = None,
    tensor_parallel_size: TensorParallelOption = 1,
    energy: Annotated[
        bool,
        measurement_option("--energy", help="Run each row for 3 s more and show the GPU's watts and tokens per joule."),
    ] = False,
    plot: Annotated[Path | None, output_option(help="Write an SVG plot of the rows and ceilings here.")] = None,
    as_json: Annotated[bool, output_option("--json", help="Print one object per row as JSON.")] = False,
) -> None:
    """Measure a model's prefill and decode speed next to the ceiling, from inside the engine.

    Without files: microscale bench gpt-oss-20b --load-format dummy
    """
    env = settings.load()
    batches, depths = parse_numbers("--concurrency", concurrency), parse_numbers("--depth", depth)
    cases = make_cases((tests or DEFAULT_TESTS).split(","), batches, depths)
    if energy and tensor_parallel_size > 1:
        raise BadSetting("--energy reads one GPU's counter; leave out --tensor-parallel-size.")

    options = EngineConfig(
        model=model,
        load_format=load_format.value,
        device=device,
        allow_slow=yes,
        precision=precision,
        layer_format=tuple(layer_format or ()),
        moe_activations=moe_activations,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=max(1, *batches),
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        reserve_memory=reserve_in_bytes(reserve_memory),
        hf_overrides=parse_overrides(hf_overrides),
        offline=env.offline,
        threads=threads,
        tensor_parallel_size=tensor_parallel_size,
    )
    import torch
    import triton

    from microscale.bench import model as bench_whole
    from microscale.bench import plot as bench_plot
    from microscale.bench.energy import EnergyMeter
    from microscale.engine.loading.prepare import prepare

    show_log()
    with closing(prepare(options)) as prepared:
        if energy and prepared.setup.gpu.is_cpu:
            raise BadSetting("--energy reads a GPU's counter, and this runs on the CPU; leave it out.")
        most = prepared.config.max_context
        if tests is None:
            cases = [case for case in cases if case.longest <= most]
        check_lengths(cases, most)
        meter = EnergyMeter(f"GPU-{torch.cuda.get_device_properties(prepared.device).uuid}") if energy else None
        loaded = load_with_progress(prepared)
        where = f"on {prepared.setup.gpu.name}"
        if tensor_parallel_size > 1:
            where += f", {tensor_parallel_size} ranks (ceiling and explain are for one of them, without sums)"
        versions = f"torch {torch.__version__}, triton {triton.__version__}"
        title = f"{model} {where}, precision {prepared.setup.precision}, {versions}"
        rows = []
        # The table and the plot are written row by row, so an error later loses nothing.
        if not as_json:
            print(title, bench_whole.header(energy), sep="\n", flush=True)
        with progress_bar("Measuring") as (start, advance):
            start(len(cases))
            shape, setup = prepared.outline, prepared.setup
            how = (max_num_batched_tokens, repeats, prepared.team, meter)
            for row in bench_whole.run(loaded, shape, setup, cases, *how):
                rows.append(row)
                if not as_json:
                    print(bench_whole.line(row), flush=True)
                if plot is not None:
                    plot.write_text(bench_plot.draw(rows, title), encoding="utf-8")
                advance(1)
    if as_json:
        print_json(bench_whole.as_json(rows))
