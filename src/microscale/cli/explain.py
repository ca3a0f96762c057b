"""``microscale explain``: what will run, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from microscale import settings
from microscale.cli.console import out, print_json
from microscale.cli.help import (
    batching_option,
    memory_option,
    model_option,
    output_option,
    precision_option,
    speculation_option,
)
from microscale.cli.options import (
    KvCacheDtypeOption,
    LayerFormatOption,
    MoeActivationsOption,
    MoeBackendOption,
    PlannedModelArgument,
    ReserveOption,
    TensorParallelOption,
    UtilizationOption,
    choices,
    reserve_in_bytes,
)
from microscale.errors import BadSetting
from microscale.planning.option_values import PRECISION_NAMES

if TYPE_CHECKING:
    from microscale.explain import Report

ALL = "all"


def explain(
    model: PlannedModelArgument = "gpt-oss-20b",
    gpu: Annotated[
        list[str] | None,
        model_option(
            metavar="CARD",
            help='A known card (h200, 5090, "RTX 4060 Ti" …). Repeat it to compare cards. '
            "Default: this machine's GPU.",
        ),
    ] = None,
    gpu_spec: Annotated[
        str | None,
        model_option(
            metavar="SPEC",
            help="A card that is not known, for an estimate: sms=84,gbs=960,gib=16,capability=12.0 (SMs, GB/s, GiB, "
            "compute capability).",
        ),
    ] = None,
    precision: Annotated[
        str,
        precision_option(
            **choices("--precision", (*PRECISION_NAMES, ALL)),
            help="exact (the checkpoint's formats), balanced (8-bit dense layers), fast (4-bit ones, FP8 KV cache), "
            "auto (the fastest whose measured cost in quality is small), or all to compare them.",
        ),
    ] = "exact",
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
            help="Show whether speculative decoding is faster: ngram, eagle3, mtp, a draft head's folder or hub id, or "
            "the JSON of serve's --speculative-config."
        ),
    ] = None,
    why: Annotated[
        bool, output_option("--why", help="Show which kernel runs each layer and why, memory, and speeds in tables.")
    ] = False,
    as_json: Annotated[bool, output_option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show whether a model fits a GPU, how fast it will be, and, with --why, which kernel runs each layer and why.

    This needs no weights and no GPU: `microscale explain gpt-oss-120b --gpu gb10`. Several cards, or --precision all,
    are compared in one table. The exit status is 1 if the model does not fit anywhere.
    """
    from microscale.explain import Question
    from microscale.explain import explain as run_explain
    from microscale.planning.choose_kernel import Preference
    from microscale.planning.precision import PRECISIONS, make_precision

    env = settings.load()
    cards: list[tuple[str | None, str | None]] = [(name, None) for name in gpu or ()]
    if gpu_spec is not None:
        cards.append((None, gpu_spec))
    names = list(PRECISIONS) if precision == ALL else [precision]
    several = len(cards) > 1 or len(names) > 1
    if several and (why or speculative is not None):
        raise BadSetting("--why and --speculative explain one card in one precision, not several.")
    reports = [
        run_explain(
            Question(
                model=model,
                gpu=card,
                gpu_spec=spec,
                precision=make_precision(name, layer_format or (), moe_activations, kv_cache_dtype),
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
        for card, spec in cards or [(None, None)]
        for name in names
    ]
    if as_json:
        print_json([report.to_json() for report in reports] if several else reports[0].to_json())
    else:
        show(reports, why=why)
    raise typer.Exit(0 if any(report.refusal is None for report in reports) else 1)


def show(reports: Sequence[Report], *, why: bool) -> None:
    """Print the answer, or the table that compares several."""
    from microscale.explain import answer_lines, compare_lines, draft_lines, render

    report = reports[0]
    if len(reports) > 1:
        lines = list(compare_lines(reports))
    else:
        lines = list(answer_lines(report))
        if why:
            lines += ["", *render(report)]
        elif report.drafts is not None:
            lines += ["", *draft_lines(report.drafts)]
        if not why:
            lines += ["[dim]--why shows kernels with reasons, memory, and speeds at other batch sizes.[/]"]
    for line in lines:
        out.print(line, soft_wrap=True)
