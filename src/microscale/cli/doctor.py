"""``microscale doctor``: what this machine has, and what it can run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from microscale import settings
from microscale.cli.console import err, out, print_json
from microscale.cli.help import output_option
from microscale.errors import MicroscaleError

if TYPE_CHECKING:
    from microscale.doctor import Finding
    from microscale.explain.models_here import ModelHere

COLOURS = {"ok": "green", "note": "yellow", "broken": "red"}


def doctor(
    as_json: Annotated[bool, output_option("--json", help="Print the findings and the models as JSON.")] = False,
) -> None:
    """Show what this machine has, what is missing and how to fix it, and which models it can run.

    This needs no GPU. The exit status is 1 if something is broken.
    """
    from microscale import doctor as doctor_module

    env = settings.load()
    findings = doctor_module.examine(offline=env.offline)
    if not as_json:
        show_findings(findings)
    models = find_models()
    if as_json:
        print_json(doctor_module.to_json(findings) | {"models": [model.to_json() for model in models]})
    elif models:
        show_models(models)
    raise typer.Exit(0 if doctor_module.healthy(findings) else 1)


def find_models() -> list[ModelHere]:
    """None where the installation is broken or the GPU cannot be used, which the findings explain."""
    try:
        with err.status("Looking which models fit"):
            return list(importlib.import_module("microscale.explain.models_here").models_here())
    except (ImportError, MicroscaleError):
        return []


def show_findings(findings: list[Finding]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(f"[{COLOURS[finding.status]}]{finding.status}[/]", finding.name, escape(finding.value))
        if finding.fix:
            table.add_row("", "", escape(f"fix: {finding.fix}"))
    out.print(table)


def show_models(models: list[ModelHere]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("model", "fits", "tokens per second", "on disk"):
        table.add_column(title, overflow="fold")
    for model in models:
        fits = f"[green]yes[/], in {model.precision}" if model.fits else f"[red]no[/], needs {model.needed_gib:.1f} GiB"
        table.add_row(model.model, fits, speed(model), model.on_disk)
    out.print()
    out.print(table)
    room = f"For one sequence, in the {models[0].usable_gib:.1f} GiB that may be used."
    out.print(f"[dim]{room} `microscale explain MODEL` shows why, and what would make it fit or faster.[/]")


def speed(model: ModelHere) -> str:
    if model.tok_s is None:
        return ""
    if model.low is not None and model.high is not None:
        return f"{model.tok_s:.0f} ({model.low:.0f} to {model.high:.0f}, {model.basis})"
    return f"{model.basis} {model.tok_s:.2g}" if model.basis == "at most" else f"{model.tok_s:.0f} ({model.basis})"
