"""The command line. Each command gathers its options, calls one function, and prints the result.

Errors that Microscale raises on purpose are one sentence on standard error and exit status 1; wrong usage is 2.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.markup import escape

from microscale import settings
from microscale.cli.console import err
from microscale.cli.explain import doctor, explain
from microscale.cli.generate import generate
from microscale.cli.measure import ModelOrCommand, bench_kernels, bench_model, profile, prove, tune
from microscale.cli.serve import serve
from microscale.errors import BadSetting, MicroscaleError
from microscale.version import __version__

app = typer.Typer(
    name="microscale",
    help="Inference for mixture-of-experts models in microscaling formats (MXFP4, MXFP8).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench_app = typer.Typer(cls=ModelOrCommand, help="Measure the speed of a model (bench MODEL) or of kernels.")
app.command()(serve)
app.command()(generate)
app.command()(explain)
app.command()(doctor)
app.add_typer(bench_app, name="bench")
bench_app.command("model")(bench_model)
bench_app.command("kernels")(bench_kernels)
app.command()(profile)
app.command()(tune)
app.command()(prove)


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
