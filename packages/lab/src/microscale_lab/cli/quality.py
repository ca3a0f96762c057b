"""``microscale quality``: what a precision costs in answers."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Annotated

import typer

from microscale import settings
from microscale.cli.bars import progress_bar
from microscale.cli.console import print_json
from microscale.errors import BadSetting
from microscale.models import embedded


def quality(
    model: Annotated[
        str, typer.Argument(help="demo (the embedded model), a checkpoint folder, or a hub id.")
    ] = embedded.NAME,
    choice: Annotated[
        list[str] | None,
        typer.Option(help="exact, balanced, fast, qkv=mxfp4, kv-cache=fp8 … Repeatable. Default: all."),
    ] = None,
    samples: Annotated[int, typer.Option(help="Prompts per task. The included file has 32.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens in an answer, with reasoning.")] = 320,
    tasks: Annotated[Path | None, typer.Option(help="File of tasks. Default: those of the embedded model.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    markdown: Annotated[Path | None, typer.Option(help="Rewrite the model's tables in this page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object per choice as JSON.")] = False,
) -> None:
    """Measure what each precision costs: accuracy on held-out tasks, loss, divergence and agreement against float32.

    A short run on the embedded model: microscale quality --choice balanced --choice fast
    """
    import torch

    from microscale.models.hub import resolve
    from microscale.text.tokenizer import Tokenizer
    from microscale_lab.quality import report
    from microscale_lab.quality.choices import choose
    from microscale_lab.quality.run import Question, run
    from microscale_lab.quality.tasks import DEMO_FOLDER, FILE_NAME, load_tasks

    env = settings.load()
    for option, number in (("--samples", samples), ("--max-tokens", max_tokens)):
        if number < 1:
            raise BadSetting(f"{option} {number} is less than 1.")
    choices = choose(choice or ())
    if markdown is not None and not markdown.is_file():
        raise BadSetting(f"--markdown {markdown} is no file; its tables are rewritten, so it must be there.")
    tokenizer = Tokenizer.load(resolve(model, offline=env.offline, config_only=True))
    asked = load_tasks(tasks or DEMO_FOLDER / FILE_NAME, samples)
    question = Question(model, tokenizer, asked, choices, device, env.offline, max_tokens)
    with progress_bar("Answering") as (start, advance):
        start(len(asked) * len(choices))
        rows = list(run(question, advance))
    title = embedded.SERVED_NAME if model == embedded.NAME else model
    where = f"{machine(device)}, torch {torch.__version__}"
    if markdown is not None:
        circumstances = f"{len(asked)} prompts, {where}, {datetime.date.today()}."
        report.write_section(markdown, title, report.as_markdown(rows, title, circumstances))
    if as_json:
        print_json(report.as_json(rows))
    else:
        print(f"{title}, {len(asked)} prompts, {where}")
        print(report.table(rows))


def machine(device: str) -> str:
    """What the figures were measured on."""
    from microscale.engine.loading.options import choose_device, gpu_of

    chosen = choose_device(device)
    return f"{os.cpu_count()} CPU cores" if chosen.type == "cpu" else gpu_of(chosen).name
