"""The command line. Each command gathers its options, calls one function, and prints the result.

Errors that Microscale raises on purpose are one sentence on standard error and exit status 1; wrong usage is 2.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
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
from microscale.bench import moe as bench_moe
from microscale.bench.tune import tune as run_tune
from microscale.engine.generate import Completion, Generation, check_budget, check_prompt
from microscale.engine.load import LoadOptions, load_model
from microscale.engine.sampler import SamplingParams
from microscale.errors import BadSetting, MicroscaleError
from microscale.hardware.tiles import GemmPath
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


class KernelBench(StrEnum):
    """The ops that `bench kernels` times."""

    MOE = "moe"


out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


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
def progress_bar(title: str) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """A progress bar on standard error that goes away when the work is done; none where that is no terminal.

    Gives two functions: one starts the bar with a total, one advances it. Until it starts, standard error is free for
    others: the hub's own bar is shown there during a download.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
    task = progress.add_task(title, start=False)

    def start(total: int) -> None:
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
    moe_backend: Annotated[str | None, typer.Option(help="The implementation of the expert layers.")] = None,
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
    options = LoadOptions(
        model=model,
        load_format=load_format,
        device=device,
        dtype=dtype,
        wish=Wish(backend, moe_backend),
        overrides=parse_overrides(hf_overrides),
        page_size=block_size,
        offline=env.offline,
    )
    check_budget(max_num_batched_tokens)
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
    op: Annotated[KernelBench, typer.Argument(help="Whose kernels.")] = KernelBench.MOE,
    model: Annotated[
        str, typer.Option(help=f"The layer of this model: {', '.join(bench_moe.LAYERS)}.")
    ] = "gpt-oss-120b",
    tokens: Annotated[str | None, typer.Option(help="Token counts, such as 1,8,64.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one row per token count as JSON.")] = False,
) -> None:
    """Time kernels on this machine's GPU, against the ceilings that it measures on the same card.

    Every row is checked against the reference first; a wrong kernel has no figure.
    """
    settings.load()
    counts = bench_moe.TOKENS if tokens is None else parse_numbers("--tokens", tokens)
    rows = []
    with progress_bar(f"Timing {op.value} of {model}") as (start, advance):
        start(len(counts))
        for row in bench_moe.run(model, counts):
            rows.append(row)
            advance(1)
    if as_json:
        print_json(bench_moe.as_json(rows))
    else:
        gpu = hardware.detect()
        print(f"{gpu.name}, torch {torch.__version__}, triton {triton.__version__}: {op.value} of {model}")
        print(bench_moe.table(rows))


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
