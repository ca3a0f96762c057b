"""``microscale explain``: what will run, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from microscale import settings
from microscale.cli.console import out, print_json
from microscale.cli.help import batching_option, memory_option, output_option, speculation_option
from microscale.cli.options import (
    CardOption,
    KvCacheDtypeOption,
    LayerFormatOption,
    MoeActivationsOption,
    MoeBackendOption,
    PlannedModelArgument,
    PrecisionOption,
    ReserveOption,
    TensorParallelOption,
    UtilizationOption,
    reserve_in_bytes,
)


def explain(
    model: PlannedModelArgument = "gpt-oss-20b",
    gpu: CardOption = None,
    precision: PrecisionOption = "exact",
    layer_format: LayerFormatOption = None,
    moe_activations: MoeActivationsOption = "auto",
    kv_cache_dtype: KvCacheDtypeOption = "auto",
    moe_backend: MoeBackendOption = None,
    context: Annotated[
        int | None, memory_option("--context", "--max-model-len", help="Maximum tokens per sequence. Default: 4096.")
    ] = None,
    batch: Annotated[
        int, batching_option("--batch", "--max-num-seqs", help="Number of sequences that decode together.")
    ] = 1,
    gpu_memory_utilization: UtilizationOption = 0.9,
    reserve_memory: ReserveOption = None,
    tensor_parallel_size: TensorParallelOption = 1,
    speculative: Annotated[
        str | None,
        speculation_option(
            help="Show whether speculative decoding is faster: ngram, eagle3, a draft head's folder or hub id, or "
            "the JSON of serve's --speculative-config."
        ),
    ] = None,
    as_json: Annotated[bool, output_option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show which kernel runs each layer and why, what fits in memory, and how fast it will be.

    This needs no weights and no GPU: `microscale explain gpt-oss-120b --gpu gb10`. The exit status is 1 if the model
    does not fit.
    """
    from microscale.explain import Question, render
    from microscale.explain import explain as run_explain
    from microscale.planning.choose_kernel import Preference
    from microscale.planning.precision import make_precision

    env = settings.load()
    report = run_explain(
        Question(
            model=model,
            gpu=gpu,
            precision=make_precision(precision, layer_format or (), moe_activations, kv_cache_dtype),
            preference=Preference(moe_backend=moe_backend),
            context=context,
            batch=batch,
            utilization=gpu_memory_utilization,
            reserve=reserve_in_bytes(reserve_memory),
            speculative=speculative,
            offline=env.offline,
            tensor_parallel_size=tensor_parallel_size,
        )
    )
    if as_json:
        print_json(report.to_json())
    else:
        for line in render(report):
            out.print(line, soft_wrap=True)
    raise typer.Exit(0 if report.refusal is None else 1)
