"""``microscale quality``: what a precision costs in answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from microscale import settings
from microscale.cli.console import print_json, progress_bar
from microscale.errors import BadSetting
from microscale.models.hub import resolve
from microscale.quality import run as comparison
from microscale.quality.choices import choose
from microscale.quality.measure import MAX_TOKENS
from microscale.quality.tasks import DEMO_FOLDER, FILE_NAME, load_tasks
from microscale.text.tokenizer import Tokenizer


def quality(
    model: Annotated[
        str | None, typer.Argument(help="A checkpoint folder or a hub id; the embedded model without.")
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="exact, balanced, fast, qkv=mxfp4, kv-cache=fp8 … Repeatable; all without.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Prompts of each task.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer, thoughts included.")] = MAX_TOKENS,
    tasks: Annotated[
        Path | None, typer.Option(help="A file of tasks; those beside the embedded model without.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one object per choice as JSON.")] = False,
) -> None:
    """Say what each precision costs: accuracy on held-out tasks, loss, divergence and agreement against float32.

    Try it on the embedded model: microscale quality --choice balanced --choice fast
    """
    env = settings.load()
    for option, number in (("--samples", samples), ("--max-tokens", max_tokens)):
        if number < 1:
            raise BadSetting(f"{option} {number} is less than 1.")
    choices = choose(choice or ())
    name = str(DEMO_FOLDER) if model is None else model
    asked = load_tasks(tasks or DEMO_FOLDER / FILE_NAME, samples)
    tokenizer = Tokenizer.load(resolve(name, offline=env.offline, config_only=True))
    question = comparison.Question(name, tokenizer, asked, choices, device, env.offline, max_tokens)
    rows = []
    with progress_bar("Answering") as (start, advance):
        start(len(asked) * len(choices))
        rows = list(comparison.run(question, advance))
    if as_json:
        print_json(comparison.as_json(rows))
    else:
        where = "the embedded model" if model is None else model
        print(f"{where}, {len(asked)} prompts, device {device}, torch {torch.__version__}")
        print(comparison.table(rows))
