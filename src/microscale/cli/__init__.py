"""The command line. Each command gathers its options, calls one function, and prints the result.

A command's module is imported when the command is called: `explain` does not wait for the server's packages, and works
where they are not installed. Errors that Microscale raises on purpose are one sentence on standard error and exit
status 1; wrong usage is 2.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from microscale import settings
from microscale.cli import late_imports
from microscale.cli.console import err, print_error
from microscale.errors import BadSetting, MicroscaleError
from microscale.version import __version__


class Place(NamedTuple):
    """Where a command is, and what the overview says of it."""

    module: str
    summary: str


COMMANDS = {
    "serve": Place("serve", "Serve a model over OpenAI's API."),
    "chat": Place("chat", "Chat with a model in the terminal."),
    "generate": Place("generate", "Complete token ids with token ids, without a tokenizer."),
    "explain": Place("explain", "Say which kernel runs each layer and why, what fits, and how fast it will be."),
    "doctor": Place("doctor", "Say what this machine has, what is missing, and how to mend it."),
    "report": Place("report", "Check and time every kernel on this GPU, and write a report to send."),
    "bench": Place("measure", "Measure the speed of a model (bench MODEL), of kernels or of a server."),
    "profile": Place("measure", "Say where one decoding step and one prompt go."),
    "quality": Place("quality", "Say what each precision costs in answers, against float32."),
    "tune": Place("measure", "Measure the expert kernels' tiles on this machine's GPU."),
    "warm": Place("warm", "Compile a model's kernels ahead, for this machine's GPU or for another."),
    "prove": Place("prove", "Compile every kernel for every architecture, without a GPU."),
}
PLANNING = ("explain",)
"""Commands that need torch only where they look at this machine's GPU."""
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


class LazyGroup(TyperGroup):
    """Lists all commands by their summaries, and loads the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS and not set(rest) & set(HELP_OPTIONS["help_option_names"]):
            greet(name)
        if name in PLANNING:
            late_imports.import_late()
        return (name, load(name), rest) if name in COMMANDS else (name, command, rest)


def greet(name: str) -> None:
    """A first line in a terminal: what is imported next takes seconds. The chat needs little, and greets by itself."""
    if err.is_terminal and name != "chat":
        err.print(f"[dim]microscale {name} {__version__} starts …[/]")


def load(name: str) -> Any:
    """A command as its module has it: a function, or a group of its own."""
    found = getattr(importlib.import_module(f"microscale.cli.{COMMANDS[name].module}"), name)
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False, context_settings=HELP_OPTIONS)
        alone.command(name)(found)
        found = alone
    command = typer.main.get_command(found)
    command.name = name
    return command


app = typer.Typer(
    cls=LazyGroup,
    name="microscale",
    help="Inference for mixture-of-experts models in microscaling formats (MXFP4, MXFP8).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP_OPTIONS,
)


def _listed() -> None:
    """Stands for a command until it is called."""


for name, place in COMMANDS.items():
    app.command(name, help=place.summary)(_listed)


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
    settings.limit_spinning()
    try:
        app()
    except (MicroscaleError, OSError) as error:
        if _wants_traceback():
            raise
        print_error(err, str(error))
        sys.exit(1)


def _wants_traceback() -> bool:
    try:
        return settings.load().debug
    except BadSetting:
        return False
