"""The command line. Each command gathers its options, calls one function, and prints the result.

Errors that Microscale raises on purpose are one sentence on standard error and exit status 1; wrong usage is 2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from microscale import doctor as doctor_module
from microscale import settings
from microscale.backends import registry
from microscale.backends.ops import Wish
from microscale.engine.generate import Completion, Generation
from microscale.engine.load import LoadOptions, load_model
from microscale.engine.sampler import SamplingParams
from microscale.errors import BadSetting, MicroscaleError
from microscale.models.gpt_oss import GptOss
from microscale.models.gpt_oss_weights import LoadFormat
from microscale.prove import run_prove
from microscale.version import __version__

app = typer.Typer(
    name="microscale",
    help="Inference for mixture-of-experts models in microscaling formats (MXFP4, MXFP8).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
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
def progress_bar(title: str) -> Iterator[Progress]:
    """A progress bar on standard error that goes away when the work is done; none where that is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        progress.add_task(title, total=None)
        yield progress


def parse_token_ids(text: str) -> list[int]:
    """``1,2,3`` as numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise BadSetting(f"--prompt-ids takes numbers with commas between them, such as 1,2,3, not {text!r}.") from None


def parse_overrides(text: str | None) -> dict[str, object]:
    """The JSON object of ``--hf-overrides``."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadSetting(
            f"--hf-overrides is not JSON ({error}); use for instance '{{\"num_hidden_layers\": 2}}'."
        ) from None
    if not isinstance(value, dict):
        raise BadSetting("--hf-overrides takes a JSON object, for instance '{\"num_hidden_layers\": 2}'.")
    return value


def load_with_progress(options: LoadOptions) -> GptOss:
    """Load a model and show each layer as it comes."""
    with progress_bar(f"Loading {options.model}") as progress:
        task = progress.task_ids[0]
        return load_model(
            options,
            on_open=lambda weights: progress.update(task, total=weights.config.num_layers),
            on_layer=lambda: progress.advance(task),
        )


def generate_with_progress(model: GptOss, prompt: list[int], params: SamplingParams, chunk: int) -> Completion:
    generation = Generation(model, [prompt], params, chunk)
    with progress_bar("Generating") as progress:
        progress.update(progress.task_ids[0], total=params.max_tokens)
        return generation.run(on_step=lambda tokens: progress.advance(progress.task_ids[0], tokens))[0]


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, a hub id (openai/gpt-oss-20b), or a preset.")],
    prompt_ids: Annotated[str, typer.Option(help="The prompt's token ids, such as 1,2,3.")],
    max_tokens: Annotated[int, typer.Option(help="Most new tokens.")] = 16,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Seed for sampling (random without) and for dummy weights (0 without).")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end token.")] = False,
    load_format: Annotated[
        LoadFormat, typer.Option(help="dummy makes random weights of the model's real shapes; no files are needed.")
    ] = "auto",
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
    prompt = parse_token_ids(prompt_ids)
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
        seed=seed or 0,
    )
    completion = generate_with_progress(load_with_progress(options), prompt, params, max_num_batched_tokens)
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
                table.add_row("", "", escape(f"→ {finding.mend}"))
        out.print(table)
    raise typer.Exit(0 if doctor_module.healthy(findings) else 1)


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
            cache_dir=env.cache_dir / "prove",
            json_output=as_json,
            markdown=markdown,
        )
    )


def main() -> None:
    """Entry point: errors raised on purpose become one sentence."""
    try:
        app()
    except MicroscaleError as error:
        if _wants_traceback():
            raise
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)


def _wants_traceback() -> bool:
    try:
        return settings.load().debug
    except BadSetting:
        return False
