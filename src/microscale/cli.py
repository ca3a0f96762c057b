"""The command line. Each command gathers its options, calls one function, and prints the result.

Errors that Microscale raises on purpose are one sentence on standard error and exit status 1; wrong usage is 2.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import triton
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from microscale import doctor as doctor_module
from microscale import hardware, settings
from microscale.backends import registry
from microscale.backends.ops import Wish
from microscale.backends.precision import make_precision
from microscale.bench import kernels as bench_table
from microscale.bench import moe as bench_moe
from microscale.bench import rows as bench_rows
from microscale.bench.record import record as record_rows
from microscale.bench.tune import tune as run_tune
from microscale.engine.generate import Completion, Generation, check_budget, check_prompt
from microscale.engine.load import LoadOptions, load_model
from microscale.engine.memory import Workload
from microscale.engine.sampler import SamplingParams
from microscale.errors import BadSetting, MicroscaleError
from microscale.explain import Question, render
from microscale.explain import explain as run_explain
from microscale.hardware.tiles import GemmPath
from microscale.kernels.op import Activations
from microscale.models.gpt_oss import GptOss
from microscale.models.gpt_oss_weights import GptOssWeights, LoadFormat
from microscale.models.json_object import parse_json
from microscale.prove import run_prove
from microscale.version import __version__

app = typer.Typer(
    name="microscale",
    help="Inference for mixture-of-experts models in microscaling formats (MXFP4, MXFP8).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench_app = typer.Typer(help="Measure speed on this machine's GPU.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


class ConsoleLog(logging.Handler):
    """Our own log on standard error, plain."""

    def emit(self, record: logging.LogRecord) -> None:
        err.print(escape(self.format(record)), soft_wrap=True)


def show_log() -> None:
    """Show what the package logs: the plan in use, once, at start."""
    logger = logging.getLogger("microscale")
    logger.setLevel(logging.INFO)
    logger.handlers = [ConsoleLog()]


# Options that several commands share.
PrecisionOption = Annotated[
    str, typer.Option(help="exact (the checkpoint's formats), balanced (8-bit dense layers) or fast (4-bit, FP8 KV).")
]
LayerFormatOption = Annotated[
    list[str] | None,
    typer.Option(help="LAYER=FORMAT: qkv, o, lm_head, embed, mlp, experts = bf16, fp8, mxfp8, mxfp4. Repeatable."),
]
MoeActivationsOption = Annotated[str, typer.Option(help="Activations that meet the experts: auto, bf16 or mxfp8.")]
KvCacheDtypeOption = Annotated[str, typer.Option(help="The KV cache's numbers: auto, bf16 or fp8.")]
UtilizationOption = Annotated[float, typer.Option(help="The part of the GPU's memory that may be used.")]
MoeBackendOption = Annotated[str | None, typer.Option(help="The implementation of the expert layers.")]


def print_json(value: Any) -> None:
    """JSON on standard output, plain, for programs."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"microscale {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@contextmanager
def progress_bar(title: str) -> Iterator[tuple[Callable[[int | None], None], Callable[[int], None]]]:
    """A progress bar on standard error that goes away when the work is done; none where that is no terminal.

    Gives two functions: one starts the bar with a total (``None``: nobody knows it), one advances it. Until it starts,
    standard error is free for others: the hub's own bar is shown there during a download.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
    task = progress.add_task(title, start=False)

    def start(total: int | None) -> None:
        progress.update(task, total=total)
        progress.start_task(task)
        progress.start()

    try:
        yield start, lambda steps: progress.advance(task, steps)
    finally:
        progress.stop()


def parse_numbers(option: str, text: str) -> list[int]:
    """``1,2,3`` as numbers."""
    if not re.fullmatch(r"\s*[0-9]{1,18}\s*(,\s*[0-9]{1,18}\s*)*", text, re.ASCII):
        raise BadSetting(f"{option} takes numbers with commas between them, such as 1,2,3, not {text[:80]!r}.")
    return [int(part) for part in text.split(",")]


def parse_overrides(text: str | None) -> dict[str, object]:
    """The JSON object of ``--hf-overrides``."""
    if text is None:
        return {}
    try:
        value = parse_json(text.encode())
    except ValueError as error:
        raise BadSetting(
            f"--hf-overrides is not JSON ({error}); use for instance '{{\"num_hidden_layers\": 2}}'."
        ) from None
    if not isinstance(value, dict):
        raise BadSetting("--hf-overrides takes a JSON object, for instance '{\"num_hidden_layers\": 2}'.")
    return value


def load_with_progress(options: LoadOptions, on_open: Callable[[GptOssWeights], None]) -> GptOss:
    """Load a model and show each layer as it comes. ``on_open`` hears the checked weights before anything is loaded."""
    with progress_bar(f"Loading {options.model}") as (start, advance):

        def opened(weights: GptOssWeights) -> None:
            on_open(weights)
            start(weights.config.num_layers)

        return load_model(options, opened, on_layer=lambda: advance(1))


def generate_with_progress(model: GptOss, prompt: list[int], params: SamplingParams, chunk: int) -> Completion:
    generation = Generation(model, [prompt], params, chunk)
    with progress_bar("Generating") as (start, advance):
        start(params.max_tokens)
        return generation.run(on_step=advance)[0]


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, a hub id (openai/gpt-oss-20b), or a preset.")],
    prompt_ids: Annotated[str, typer.Option(help="The prompt's token ids, such as 1,2,3.")],
    max_tokens: Annotated[int, typer.Option(help="Most new tokens.")] = 16,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed for sampling; random without.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end token.")] = False,
    load_format: Annotated[
        LoadFormat, typer.Option(help="dummy makes random weights of the model's real shapes; no files are needed.")
    ] = LoadFormat.AUTO,
    hf_overrides: Annotated[
        str | None, typer.Option(help="JSON that replaces keys of config.json: '{\"num_hidden_layers\": 2}'.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="Activations: auto (bfloat16 on a GPU, float32 on a CPU), float32, bfloat16.")
    ] = "auto",
    backend: Annotated[
        str | None, typer.Option(help="One implementation for every op that has it: reference, dequantized …")
    ] = None,
    moe_backend: MoeBackendOption = None,
    precision: PrecisionOption = "exact",
    layer_format: LayerFormatOption = None,
    moe_activations: MoeActivationsOption = "auto",
    kv_cache_dtype: KvCacheDtypeOption = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and completion together; as asked for without.")
    ] = None,
    gpu_memory_utilization: UtilizationOption = 0.9,
    block_size: Annotated[int, typer.Option(help="Positions in one page of the KV cache.")] = 16,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Most tokens in one step: longer prompts run in chunks.")
    ] = 2048,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print token_ids, logprobs and finish_reason as JSON.")
    ] = False,
) -> None:
    """Complete token ids with token ids, without a tokenizer.

    Try it with no files at all: microscale generate gpt-oss-tiny --load-format dummy --prompt-ids 1,2,3
    """
    env = settings.load()
    prompt = parse_numbers("--prompt-ids", prompt_ids)
    params = SamplingParams(max_tokens, temperature, seed, ignore_eos)
    check_length(prompt, max_tokens, max_model_len)
    options = LoadOptions(
        model=model,
        load_format=load_format,
        device=device,
        dtype=dtype,
        wish=Wish(backend, moe_backend),
        precision=make_precision(precision, layer_format or (), moe_activations, kv_cache_dtype),
        workload=Workload(
            context=max_model_len or len(prompt) + max_tokens,
            step_tokens=max_num_batched_tokens,
            utilization=gpu_memory_utilization,
        ),
        overrides=parse_overrides(hf_overrides),
        page_size=block_size,
        offline=env.offline,
    )
    check_budget(max_num_batched_tokens)
    show_log()
    loaded = load_with_progress(options, on_open=lambda weights: check_prompt(prompt, max_tokens, weights.config))
    completion = generate_with_progress(loaded, prompt, params, max_num_batched_tokens)
    if as_json:
        print_json(
            {
                "token_ids": completion.token_ids,
                "logprobs": completion.logprobs,
                "finish_reason": completion.finish_reason,
            }
        )
    else:
        print(",".join(map(str, completion.token_ids)))


def check_length(prompt: list[int], max_tokens: int, max_model_len: int | None) -> None:
    """Refuse a request that is longer than what was reserved for it."""
    wanted = len(prompt) + max_tokens
    if max_model_len is not None and wanted > max_model_len:
        raise BadSetting(
            f"--max-model-len {max_model_len} is less than the {len(prompt)} prompt tokens and {max_tokens} new ones; "
            f"{wanted} would do."
        )


@app.command()
def explain(
    model: Annotated[
        str, typer.Argument(help="A preset (gpt-oss-120b, gemma-4-26b-a4b …), a checkpoint folder or a hub id.")
    ] = "gpt-oss-20b",
    gpu: Annotated[
        str | None, typer.Option(help=f"A known card: {', '.join(hardware.KNOWN)}. This machine's without.")
    ] = None,
    precision: PrecisionOption = "exact",
    layer_format: LayerFormatOption = None,
    moe_activations: MoeActivationsOption = "auto",
    kv_cache_dtype: KvCacheDtypeOption = "auto",
    moe_backend: MoeBackendOption = None,
    context: Annotated[
        int | None, typer.Option("--context", "--max-model-len", help="Tokens of a sequence; 4096 without.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", "--max-num-seqs", help="Sequences at once.")] = 1,
    gpu_memory_utilization: UtilizationOption = 0.9,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say which kernel runs each layer and why, what fits in memory, and how fast it will be.

    No weights and no GPU are needed: microscale explain gpt-oss-120b --gpu gb10. The exit status is 1 when the model
    does not fit.
    """
    env = settings.load()
    report = run_explain(
        Question(
            model=model,
            gpu=gpu,
            precision=make_precision(precision, layer_format or (), moe_activations, kv_cache_dtype),
            wish=Wish(moe_backend=moe_backend),
            context=context,
            batch=batch,
            utilization=gpu_memory_utilization,
            offline=env.offline,
        )
    )
    if as_json:
        print_json(report.to_json())
    else:
        for line in render(report):
            out.print(line, soft_wrap=True)
    raise typer.Exit(0 if report.refusal is None else 1)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Say what this machine has, what is missing, and how to mend it.

    The exit status is 1 when something is broken. No GPU is needed.
    """
    settings.load()
    findings = doctor_module.examine()
    if as_json:
        print_json(doctor_module.to_json(findings))
    else:
        colours = {"ok": "green", "note": "yellow", "broken": "red"}
        table = Table(box=None, pad_edge=False, show_header=False)
        for _ in range(3):
            table.add_column(overflow="fold")
        for finding in findings:
            table.add_row(f"[{colours[finding.status]}]{finding.status}[/]", finding.name, escape(finding.value))
            if finding.mend:
                table.add_row("", "", escape(f"mend: {finding.mend}"))
        out.print(table)
    raise typer.Exit(0 if doctor_module.healthy(findings) else 1)


@bench_app.command("kernels")
def bench_kernels(
    op: Annotated[bench_table.KernelBench, typer.Argument(help="Whose kernels.")] = bench_table.KernelBench.MOE,
    model: Annotated[
        str | None, typer.Option(help=f"moe: the layer of this model, {', '.join(bench_moe.LAYERS)}.")
    ] = None,
    activations: Annotated[Activations, typer.Option(help="moe: bf16, or mxfp8 for 8-bit kernels.")] = Activations.BF16,
    tokens: Annotated[str | None, typer.Option(help="Token counts, such as 1,8,64.")] = None,
    record: Annotated[bool, typer.Option(help="Keep the rows: predictions of this card's family use them.")] = False,
    directory: Annotated[Path | None, typer.Option(help="--record: write here instead of into the package.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object per row as JSON.")] = False,
) -> None:
    """Time kernels on this machine's GPU, against the ceilings that it measures on the same card.

    Every row is checked against the reference first; a wrong kernel has no figure.
    """
    settings.load()
    rows = []
    with progress_bar(f"Timing {op.value}") as (start, advance):
        start(None)
        counts = None if tokens is None else parse_numbers("--tokens", tokens)
        for row in bench_table.run(op, model, counts, activations):
            rows.append(row)
            advance(1)
    gpu = hardware.detect()
    if as_json:
        print_json(bench_rows.as_json(rows))
    else:
        print(f"{gpu.name}, torch {torch.__version__}, triton {triton.__version__}: {op.value}")
        print(bench_rows.table(rows))
    if record:
        err.print(f"Wrote {record_rows(rows, gpu, directory)}", soft_wrap=True)


@app.command()
def tune(
    path: Annotated[list[GemmPath] | None, typer.Option(help="Only this path; may be given several times.")] = None,
    directory: Annotated[Path | None, typer.Option(help="Write here instead of into the package.")] = None,
) -> None:
    """Measure the expert kernels' tiles on this machine's GPU and write the file for its family.

    Until a family is tuned, a rule that knows the card's shared memory, registers and SMs chooses the tiles.
    """
    settings.load()
    written = run_tune(hardware.detect(), directory, paths=path)
    out.print(f"Wrote {written}", soft_wrap=True)


@app.command()
def prove(
    gpu: Annotated[str, typer.Option(help="A known card (rtx5090, gb10 …) or all.")] = "all",
    op: Annotated[str | None, typer.Option(help="One op only: moe, attention …")] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes; one per core without.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Rewrite this page's tables for the Triton in use.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one row per kernel and architecture as JSON.")] = False,
) -> None:
    """Compile every kernel for every architecture, without a GPU, and hold it against the card's limits.

    It fails on a compile error, too much shared memory, spilled registers, an instruction that the card does not have,
    and a matrix instruction that was promised and is missing. What was compiled once is cached.
    """
    env = settings.load()
    raise typer.Exit(
        run_prove(
            registry.IMPLEMENTATIONS,
            gpu=gpu,
            op=op,
            jobs=jobs,
            cache_dir=env.cache_dir,
            json_output=as_json,
            markdown=markdown,
        )
    )


def main() -> None:
    """Run the command line: errors raised on purpose, and a full disk or a closed pipe, become one sentence."""
    try:
        app()
    except (MicroscaleError, OSError) as error:
        if _wants_traceback():
            raise
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)


def _wants_traceback() -> bool:
    try:
        return settings.load().debug
    except BadSetting:
        return False
