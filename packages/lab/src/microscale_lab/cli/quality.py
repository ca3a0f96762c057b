"""``microscale quality``: what a precision costs in answers."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Annotated

import typer

from microscale import settings
from microscale.cli.bars import progress_bar
from microscale.cli.console import err, print_json
from microscale.cli.help import measurement_option, output_option, precision_option, sampling_option
from microscale.cli.options import DeviceOption
from microscale.errors import BadSetting
from microscale.models import embedded


def quality(
    model: Annotated[
        str, typer.Argument(help="demo (the embedded model), a checkpoint folder, or a hub id.")
    ] = embedded.NAME,
    choice: Annotated[
        list[str] | None,
        precision_option(help="exact, balanced, fast, qkv=mxfp4, kv-cache=fp8 … Repeatable. Default: all."),
    ] = None,
    samples: Annotated[int, measurement_option(help="Prompts per task. The shipped file has 32.")] = 8,
    max_tokens: Annotated[
        int, sampling_option(help="Maximum length of an answer in tokens, including reasoning.")
    ] = 320,
    tasks: Annotated[Path | None, measurement_option(help="File of tasks. Default: the embedded model's.")] = None,
    device: DeviceOption = "auto",
    markdown: Annotated[Path | None, output_option(help="Rewrite the tables of this page for the model.")] = None,
    record: Annotated[
        bool,
        output_option(
            "--record", help="Store the cost of each precision, so that --precision auto and explain know it for MODEL."
        ),
    ] = False,
    as_json: Annotated[bool, output_option("--json", help="Print one object per choice as JSON.")] = False,
) -> None:
    """Measure what each precision costs: accuracy on held-out tasks, loss, divergence and agreement with float32.

    A short run on the embedded model: microscale quality --choice balanced --choice fast
    """
    import torch

    from microscale.engine import quality_costs
    from microscale.engine.loading.prepare import choose_device
    from microscale.models.hub import resolve
    from microscale.text.tokenizer import Tokenizer
    from microscale_lab.markdown import write_section
    from microscale_lab.quality import report
    from microscale_lab.quality.run import Comparison, choose, run
    from microscale_lab.quality.tasks import DEMO_FOLDER, FILE_NAME, load_tasks

    env = settings.load()
    for option, number in (("--samples", samples), ("--max-tokens", max_tokens)):
        if number < 1:
            raise BadSetting(f"{option} {number} is less than 1.")
    choices = choose(choice or ())
    if markdown is not None and not markdown.is_file():
        raise BadSetting(f"--markdown {markdown} is not a file; it must exist, because its tables are rewritten.")
    tokenizer = Tokenizer.load(resolve(model, offline=env.offline, config_only=True))
    asked = load_tasks(tasks or DEMO_FOLDER / FILE_NAME, samples)
    question = Comparison(model, tokenizer, asked, choices, device, env.offline, max_tokens)
    with progress_bar("Answering") as (start, advance):
        start(len(asked) * len(choices))
        rows = list(run(question, advance))
    title = embedded.SERVED_NAME if model == embedded.NAME else model
    where = f"{machine(device)}, torch {torch.__version__}"
    if markdown is not None:
        circumstances = f"{len(asked)} prompts, {where}, {datetime.date.today()}."
        write_section(markdown, f"quality of {title}", report.as_markdown(rows, title, circumstances))
    if record:
        on_gpu = choose_device(device).type == "cuda"
        quality_costs.write(report.as_costs(rows, quality_costs.table_name(model), machine(device), len(asked), on_gpu))
        err.print(f"Wrote {quality_costs.FILE}", soft_wrap=True)
    if as_json:
        print_json(report.as_json(rows))
    else:
        print(f"{title}, {len(asked)} prompts, {where}")
        print(report.table(rows))


def machine(device: str) -> str:
    """What the figures were measured on."""
    from microscale.engine.loading.prepare import choose_device, gpu_of

    chosen = choose_device(device)
    return f"{os.cpu_count()} CPU cores" if chosen.type == "cpu" else gpu_of(chosen).name
