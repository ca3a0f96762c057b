"""``microscale bench``, ``profile`` and ``tune``: how fast, where the time goes, and in which tiles."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import torch
import triton
import typer
from typer.core import TyperGroup

from microscale import hardware, settings
from microscale.backends.precision import make_precision
from microscale.bench import kernels as bench_table
from microscale.bench import model as bench_whole
from microscale.bench import moe as bench_moe
from microscale.bench import plot as bench_plot
from microscale.bench import profile as bench_profile
from microscale.bench import rows as bench_rows
from microscale.bench.energy import EnergyMeter
from microscale.bench.record import record as record_rows
from microscale.bench.tune import JOBS as TUNED
from microscale.bench.tune import parse_kernels
from microscale.bench.tune import tune as run_tune
from microscale.cli.bars import progress_bar
from microscale.cli.bench_fit import bench_fit
from microscale.cli.bench_load import bench_load
from microscale.cli.bench_scale import bench_scale
from microscale.cli.bench_serve import PASSED_ON, bench_serve
from microscale.cli.bench_speculative import ACCEPTANCE, bench_speculative
from microscale.cli.bench_sweep import bench_sweep
from microscale.cli.console import err, out, parse_numbers, print_json, show_log
from microscale.cli.model import load_with_progress
from microscale.cli.options import (
    MODEL_HELP,
    KvCacheDtypeOption,
    LayerFormatOption,
    MoeActivationsOption,
    PrecisionOption,
    ReserveOption,
    TensorParallelOption,
    ThreadsOption,
    UtilizationOption,
    reserve_in_bytes,
)
from microscale.cli.overrides import parse_overrides
from microscale.cli.played import AsOption, labelled, played_card
from microscale.engine.loading.memory import Workload
from microscale.engine.loading.options import LoadOptions
from microscale.engine.loading.prepare import prepare
from microscale.errors import BadSetting
from microscale.kernels.op import Activations
from microscale.models.families import LoadFormat


class ModelOrCommand(TyperGroup):
    """``bench MODEL …`` beside ``bench kernels``: what is no command is the model. ``--serve`` stands for ``serve``,
    and ``--speculative-acceptance`` for ``speculative``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--serve" in args:
            args = ["serve", *(each for each in args if each != "--serve")]
        elif args[:1] != ["speculative"] and any(each.split("=")[0] == ACCEPTANCE for each in args):
            args = ["speculative", *args]
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = ["model", *args]
        return super().parse_args(ctx, args)


def bench_model(
    model: Annotated[str, typer.Argument(help=f"{MODEL_HELP}.")] = "gpt-oss-20b",
    load_format: Annotated[
        LoadFormat, typer.Option(help="dummy makes random weights of the model's real shapes; no files are needed.")
    ] = LoadFormat.AUTO,
    tests: Annotated[str, typer.Option(help="ppN: a prompt of N tokens; tgN: N new tokens.")] = ",".join(
        bench_whole.TESTS
    ),
    concurrency: Annotated[str, typer.Option(help="Sequences that decode together, such as 1,8,64.")] = "1",
    depth: Annotated[str, typer.Option(help="Tokens of context before decoding, such as 128,8192.")] = str(
        bench_whole.DEPTH
    ),
    repeats: Annotated[int, typer.Option(help="Runs of each row; the median is shown.")] = 3,
    precision: PrecisionOption = "exact",
    layer_format: LayerFormatOption = None,
    moe_activations: MoeActivationsOption = "auto",
    kv_cache_dtype: KvCacheDtypeOption = "auto",
    gpu_memory_utilization: UtilizationOption = 0.9,
    reserve_memory: ReserveOption = None,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens in one step.")] = 8192,
    hf_overrides: Annotated[
        str | None, typer.Option(help="JSON that replaces keys of config.json: '{\"num_hidden_layers\": 2}'.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: ThreadsOption = None,
    tensor_parallel_size: TensorParallelOption = 1,
    card: AsOption = None,
    energy: Annotated[
        bool,
        typer.Option("--energy", help="Run each row for 3 s more, and say what the GPU took (watts, tokens a joule)."),
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the rows here, with their ceilings, as SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object per row as JSON.")] = False,
) -> None:
    """Measure a model's prefill and decode speed beside the ceiling, from inside the engine.

    Without files: microscale bench gpt-oss-20b --load-format dummy
    """
    env = settings.load()
    if repeats < 1:
        raise BadSetting(f"--repeats {repeats} is less than 1.")
    batches, depths = parse_numbers("--concurrency", concurrency), parse_numbers("--depth", depth)
    asked = make_precision(precision, layer_format or (), moe_activations, kv_cache_dtype)
    options = LoadOptions(
        model=model,
        load_format=load_format,
        device=device,
        precision=asked,
        workload=Workload(
            sequences=max(1, *batches),
            step_tokens=max_num_batched_tokens,
            utilization=gpu_memory_utilization,
            reserve=reserve_in_bytes(reserve_memory),
        ),
        overrides=parse_overrides(hf_overrides),
        offline=env.offline,
        threads=threads,
        tensor_parallel_size=tensor_parallel_size,
    )
    if card is not None and device == "cpu":
        raise BadSetting("--as runs kernels on a GPU; --device cpu starts none.")
    if energy and tensor_parallel_size > 1:
        raise BadSetting("--energy reads one GPU's counter; leave out --tensor-parallel-size.")
    if card is not None and tensor_parallel_size > 1:
        raise BadSetting("--as plays a card in this process alone; leave out --tensor-parallel-size.")
    show_log()
    with played_card(card) as label, closing(prepare(options)) as prepared:
        if energy and prepared.setup.gpu.is_cpu:
            raise BadSetting("--energy reads a GPU's counter, and this runs on the CPU; leave it out.")
        cases = bench_whole.make_cases(tests.split(","), batches, depths, prepared.config.max_context)
        meter = EnergyMeter(f"GPU-{torch.cuda.get_device_properties(prepared.device).uuid}") if energy else None
        loaded = load_with_progress(prepared)
        where = f"on {prepared.setup.gpu.name}" if label is None else f"with {label}"
        if tensor_parallel_size > 1:
            where += f", {tensor_parallel_size} ranks (ceiling and explain: one of them, without sums)"
        title = f"{model} {where}, precision {asked}, torch {torch.__version__}, triton {triton.__version__}"
        rows = []
        # Row by row, table and plot: what was measured stays, whatever happens to the rest.
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
        print_json(labelled(bench_whole.as_json(rows), label))


def profile(
    model: Annotated[str, typer.Argument(help=f"{MODEL_HELP}.")],
    load_format: Annotated[
        LoadFormat, typer.Option(help="dummy makes random weights of the model's real shapes; no files are needed.")
    ] = LoadFormat.AUTO,
    batch: Annotated[int, typer.Option(help="Sequences that decode together.")] = 1,
    depth: Annotated[int, typer.Option(help="Tokens of context before decoding.")] = bench_whole.DEPTH,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 2048,
    trace: Annotated[
        Path | None, typer.Option(help="Write the decoding steps here, for chrome://tracing or Perfetto.")
    ] = None,
    precision: PrecisionOption = "exact",
    layer_format: LayerFormatOption = None,
    moe_activations: MoeActivationsOption = "auto",
    kv_cache_dtype: KvCacheDtypeOption = "auto",
    gpu_memory_utilization: UtilizationOption = 0.9,
    reserve_memory: ReserveOption = None,
    hf_overrides: Annotated[
        str | None, typer.Option(help="JSON that replaces keys of config.json: '{\"num_hidden_layers\": 2}'.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the parts as JSON.")] = False,
) -> None:
    """Say where one decoding step and one prompt go: time, share and floor of every part.

    Without files: microscale profile gpt-oss-20b --load-format dummy
    """
    env = settings.load()
    for name, number in (("--batch", batch), ("--depth", depth), ("--prompt", prompt)):
        if number < 1:
            raise BadSetting(f"{name} {number} is less than 1.")
    asked = make_precision(precision, layer_format or (), moe_activations, kv_cache_dtype)
    options = LoadOptions(
        model=model,
        load_format=load_format,
        device=device,
        precision=asked,
        workload=Workload(
            sequences=batch,
            step_tokens=max(8192, prompt),
            utilization=gpu_memory_utilization,
            reserve=reserve_in_bytes(reserve_memory),
        ),
        overrides=parse_overrides(hf_overrides),
        offline=env.offline,
    )
    show_log()
    prepared = prepare(options)
    tests = [f"pp{prompt}", f"tg{4 * bench_profile.STEPS}"]
    bench_whole.make_cases(tests, [batch], [depth], prepared.config.max_context)  # refuses what is too long
    loaded = load_with_progress(prepared)
    found = bench_profile.run(loaded, prepared.outline, prepared.setup, batch, depth, prompt, trace)
    if as_json:
        print_json(bench_profile.as_json(found))
    else:
        gpu = prepared.setup.gpu.name
        print(f"{model} on {gpu}, precision {asked}, torch {torch.__version__}, triton {triton.__version__}")
        print(bench_profile.table(found))


def bench_kernels(
    op: Annotated[bench_table.KernelBench, typer.Argument(help="Whose kernels.")] = bench_table.KernelBench.MOE,
    model: Annotated[
        str | None, typer.Option(help=f"moe: the layer of this model, {', '.join(bench_moe.LAYERS)}.")
    ] = None,
    activations: Annotated[Activations, typer.Option(help="moe: bf16, or mxfp8 for 8-bit kernels.")] = Activations.BF16,
    tokens: Annotated[str | None, typer.Option(help="Token counts, such as 1,8,64.")] = None,
    card: AsOption = None,
    record: Annotated[bool, typer.Option(help="Keep the rows: predictions of this card's family use them.")] = False,
    directory: Annotated[Path | None, typer.Option(help="--record: write here instead of into the package.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object per row as JSON.")] = False,
) -> None:
    """Time kernels on this machine's GPU, against the ceilings that it measures on the same card.

    Every row is checked against the reference first; a wrong kernel has no figure.
    """
    settings.load()
    rows = []
    with played_card(card) as label, progress_bar(f"Timing {op.value}") as (start, advance):
        start(None)
        counts = None if tokens is None else parse_numbers("--tokens", tokens)
        for row in bench_table.run(op, model, counts, activations):
            rows.append(row)
            advance(1)
    gpu = hardware.detect()
    if as_json:
        print_json(labelled(bench_rows.as_json(rows), label))
    else:
        print(f"{label or gpu.name}, torch {torch.__version__}, triton {triton.__version__}: {op.value}")
        print(bench_rows.table(rows))
    if record:
        err.print(f"Wrote {record_rows(rows, gpu, directory, card)}", soft_wrap=True)


def tune(
    kernels: Annotated[
        str | None,
        typer.Option(help=f"Only these: {', '.join(TUNED)}; with commas."),
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="A few tiles of a few cases, in two or three minutes: whether tuning works here.")
    ] = False,
    directory: Annotated[Path | None, typer.Option(help="Write here instead of into the package.")] = None,
) -> None:
    """Measure the kernels' tiles and thresholds on this machine's GPU and write the file for its family.

    Each tile is checked against the reference before it is timed. Until a family is tuned, a rule that knows the card's
    shared memory, registers and bandwidth chooses the tiles. Compiling takes most of the time, on all cores.
    """
    settings.load()
    written = run_tune(hardware.detect(), directory, kernels=parse_kernels(kernels), quick=quick, console=err)
    out.print(f"Wrote {written}", soft_wrap=True)


bench = typer.Typer(
    cls=ModelOrCommand,
    help="Measure a model (bench MODEL), kernels (bench kernels), loading (bench load) or a server (bench serve).",
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench.command("model")(bench_model)
bench.command("kernels")(bench_kernels)
bench.command("serve", context_settings=PASSED_ON)(bench_serve)
bench.command("load")(bench_load)
bench.command("fit")(bench_fit)
bench.command("scale")(bench_scale)
bench.command("sweep")(bench_sweep)
bench.command("speculative")(bench_speculative)
