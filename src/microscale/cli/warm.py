"""``microscale warm``: compile a model's kernels before any server starts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from microscale import settings
from microscale.cli.bars import progress_bar
from microscale.cli.console import err, out, print_json
from microscale.cli.help import batching_option, device_option, output_option
from microscale.cli.options import (
    BackendOption,
    BlockSizeOption,
    CardOption,
    KernelCacheOption,
    KvCacheDtypeOption,
    LayerFormatOption,
    MoeActivationsOption,
    MoeBackendOption,
    PlannedModelArgument,
    PrecisionOption,
    SpeculativeOption,
)
from microscale.errors import BadSetting

if TYPE_CHECKING:
    from microscale.hardware import Gpu
    from microscale.planning.ops import Kernel


@dataclass(frozen=True)
class Summary:
    """What ``warm`` did."""

    model: str
    gpu: str
    kernels: int
    compiled: int
    """How many of ``kernels`` were compiled now; the others were in the cache."""
    failed: list[str]
    """Name and reason of each kernel that does not compile."""
    seconds: float
    cache_mb: float
    folder: str


def warm(
    model: PlannedModelArgument = "gpt-oss-20b",
    gpu: CardOption = None,
    precision: PrecisionOption = "exact",
    layer_format: LayerFormatOption = None,
    moe_activations: MoeActivationsOption = "auto",
    kv_cache_dtype: KvCacheDtypeOption = "auto",
    backend: BackendOption = None,
    moe_backend: MoeBackendOption = None,
    block_size: BlockSizeOption = 16,
    max_num_batched_tokens: Annotated[
        int | None,
        batching_option(help="Maximum number of tokens in one step of the server. Default: any number.", min=1),
    ] = None,
    speculative_config: SpeculativeOption = None,
    kernel_cache: KernelCacheOption = None,
    jobs: Annotated[
        int | None, device_option(help="Compiler processes. Default: as cores and memory allow.", min=1)
    ] = None,
    as_json: Annotated[bool, output_option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Compile every kernel that a model may launch, so that a server that starts later compiles nothing.

    This needs no weights and no GPU. `microscale warm openai/gpt-oss-20b --gpu gb10` fills the cache of an image for a
    DGX Spark; run it with the Python of that image. The exit status is 1 if a kernel does not compile.
    """
    from microscale import hardware
    from microscale.engine.loading.drafting import expect_head, prepare_head
    from microscale.engine.loading.memory import Workload
    from microscale.engine.loading.precisions import settle_precision
    from microscale.engine.loading.warming import recorded
    from microscale.engine.speculation.config import parse_config
    from microscale.explain.report import read_model
    from microscale.kernels.compiling.cache import use_cache
    from microscale.kernels.compiling.job import workers
    from microscale.models.config import LoadFormat
    from microscale.models.families import PRESETS
    from microscale.models.outline import outline
    from microscale.models.recorded import MAX_TOKENS
    from microscale.planning.ops import Activations, Preference
    from microscale.planning.plan import Setup
    from microscale.planning.precision import make_precision

    env = settings.load()
    card = hardware.detect() if gpu is None else hardware.known(gpu)
    if card.is_cpu:
        raise BadSetting(f"This machine has no GPU; name a card with --gpu: {', '.join(hardware.KNOWN)}.")
    setup = Setup(
        card,
        Activations.BF16,
        Preference(backend, moe_backend),
        make_precision(precision, layer_format or (), moe_activations, kv_cache_dtype),
    )
    config = read_model(model, env.offline)
    shape = outline(model, config, Activations.BF16, block_size, config.max_context)
    setup, chosen_because = settle_precision(shape, setup, Workload(page_size=block_size))
    if chosen_because is not None:
        err.print(chosen_because, soft_wrap=True, markup=False)
    drafts = parse_config(speculative_config)
    draft_tokens = 0 if drafts is None else drafts.num_speculative_tokens
    shape.check_drafts(draft_tokens)
    head = None
    if drafts is not None and drafts.is_head:
        load_format = LoadFormat.DUMMY if model in PRESETS else LoadFormat.AUTO
        expected = expect_head(drafts, model, config, offline=env.offline, load_format=load_format)
        head = prepare_head(expected, setup, block_size, drafts.head_formats)
    kernels = list(recorded(config, setup, block_size, max_num_batched_tokens or MAX_TOKENS, draft_tokens, head))
    summary = fill(model, card, kernels, use_cache(kernel_cache), jobs or workers(hardware.system_memory()[1]))
    if as_json:
        print_json(asdict(summary))
    else:
        show(summary)
    raise typer.Exit(1 if summary.failed else 0)


def fill(model: str, gpu: Gpu, kernels: Sequence[Kernel], folder: Path, num_workers: int) -> Summary:
    """Compile the kernels that the cache lacks."""
    from triton.backends.compiler import GPUTarget

    from microscale.hardware import WARP_SIZE
    from microscale.kernels.compiling.cache import folder_bytes
    from microscale.kernels.compiling.job import CompileJob, missing, run_job

    began = time.monotonic()
    target = GPUTarget("cuda", gpu.sm, WARP_SIZE)
    uncached = missing(kernels, target)
    failed: list[str] = []
    compiled = 0
    with progress_bar(f"Compiling for {gpu.name}") as (start, advance):
        start(len(uncached))
        for result in run_job(CompileJob(uncached, target, folder, num_workers)):
            if result.error is not None:
                failed.append(f"{result.name}: {result.error}")
            if result.kernel is not None:
                compiled += result.error is None
                advance(1)
    seconds = round(time.monotonic() - began, 1)
    size = round(folder_bytes(folder) / 1e6, 1)
    return Summary(model, gpu.name, len(kernels), compiled, failed, seconds, size, str(folder))


def show(summary: Summary) -> None:
    for failure in summary.failed:
        err.print(f"[red]failed[/] {escape(failure)}", soft_wrap=True)
    cached = summary.kernels - summary.compiled - len(summary.failed)
    out.print(
        f"{summary.model} on {summary.gpu}: {summary.kernels} kernels, {summary.compiled} compiled in "
        f"{summary.seconds} s, {cached} were in the cache. {summary.folder} holds {summary.cache_mb} MB.",
        soft_wrap=True,
        markup=False,
    )
