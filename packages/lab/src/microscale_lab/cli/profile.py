"""``microscale profile``: where the time of a step goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from microscale import settings
from microscale.bench.cases import check_lengths, make_cases
from microscale.cli.console import print_json, show_log
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
    UtilizationOption,
    parse_overrides,
    reserve_in_bytes,
)
from microscale.errors import BadSetting
from microscale.models.config import LoadFormat


def profile(
    model: Annotated[str, typer.Argument(help=f"{MODEL_HELP}.")],
    load_format: LoadFormatOption = LoadFormat.AUTO,
    batch: Annotated[int, batching_option(help="Number of sequences that decode together.")] = 1,
    depth: Annotated[int, measurement_option(help="Tokens of context before decoding.")] = 128,
    prompt: Annotated[int, measurement_option(help="Prompt length in tokens.")] = 2048,
    trace: Annotated[
        Path | None, output_option(help="Write a trace of the decoding steps here, for chrome://tracing or Perfetto.")
    ] = None,
    precision: PrecisionOption = "exact",
    layer_format: LayerFormatOption = None,
    moe_activations: MoeActivationsOption = "auto",
    kv_cache_dtype: KvCacheDtypeOption = "auto",
    gpu_memory_utilization: UtilizationOption = 0.9,
    reserve_memory: ReserveOption = None,
    hf_overrides: OverridesOption = None,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, output_option("--json", help="Print the parts as JSON.")] = False,
) -> None:
    """Show where the time of one decoding step and one prompt goes: time, share and lower bound of every part.

    Without files: microscale profile gpt-oss-20b --load-format dummy
    """
    import torch
    import triton

    from microscale.cli.bars import load_with_progress
    from microscale.engine.config import EngineConfig
    from microscale.engine.loading.prepare import prepare
    from microscale_lab.model_bench import profile as bench_profile

    env = settings.load()
    for name, number in (("--batch", batch), ("--depth", depth), ("--prompt", prompt)):
        if number < 1:
            raise BadSetting(f"{name} {number} is less than 1.")
    options = EngineConfig(
        model=model,
        load_format=load_format.value,
        device=device,
        precision=precision,
        layer_format=tuple(layer_format or ()),
        moe_activations=moe_activations,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=batch,
        max_num_batched_tokens=max(8192, prompt),
        gpu_memory_utilization=gpu_memory_utilization,
        reserve_memory=reserve_in_bytes(reserve_memory),
        hf_overrides=parse_overrides(hf_overrides),
        offline=env.offline,
    )
    show_log()
    prepared = prepare(options)
    cases = make_cases([f"pp{prompt}", f"tg{4 * bench_profile.STEPS}"], [batch], [depth])
    check_lengths(cases, prepared.config.max_context)
    loaded = load_with_progress(prepared)
    found = bench_profile.run(loaded, prepared.outline, prepared.setup, batch, depth, prompt, trace)
    if as_json:
        print_json(bench_profile.as_json(found))
    else:
        setup, versions = prepared.setup, f"torch {torch.__version__}, triton {triton.__version__}"
        print(f"{model} on {setup.gpu.name}, precision {setup.precision}, {versions}")
        print(bench_profile.table(found))
