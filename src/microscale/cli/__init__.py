"""The command line. Each command gathers its options, calls one function, and prints the result.

A command's module is imported when the command is called, and it imports torch, Triton, NumPy and the engine inside its
function, so that every ``--help`` is quick. An error that Microscale raises on purpose is printed as one sentence on
standard error, with exit status 1; wrong usage exits with 2.
"""

from __future__ import annotations

import _thread
import sys
import threading
from typing import Annotated, Any

import typer

from microscale import settings
from microscale.cli.console import err, print_error
from microscale.cli.group import HELP_OPTIONS, LazyGroup, Place, load_command, with_installed
from microscale.errors import BadSetting, MicroscaleError
from microscale.version import __version__

COMMANDS = with_installed(
    {
        "serve": Place("microscale.cli.serve:serve", "Serve a model over OpenAI's and Anthropic's APIs."),
        "chat": Place("microscale.cli.chat:chat", "Chat with a model in the terminal."),
        "run": Place("microscale.cli.run:run", "Answer one question as plain text: run [MODEL] QUESTION."),
        "generate": Place(
            "microscale.cli.generate:generate", "Generate token ids from token ids, without a tokenizer."
        ),
        "explain": Place(
            "microscale.cli.explain:explain",
            "Predict memory and speed; show which kernels run and why.",
        ),
        "doctor": Place("microscale.cli.doctor:doctor", "Show what this machine has and what is missing."),
        "bench": Place("microscale.cli.bench:bench", "Measure the speed of a model (bench MODEL) or of a server."),
        "warm": Place("microscale.cli.warm:warm", "Compile a model's kernels ahead of time, for any GPU."),
    },
    "microscale.commands",
)


class Commands(LazyGroup):
    """The commands of ``microscale``."""

    places = COMMANDS
    entry_group = "microscale.commands"

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in COMMANDS and not set(args[1:]) & set(HELP_OPTIONS["help_option_names"]):
            greet(args[0])
        return super().resolve_command(ctx, args)


def greet(name: str) -> None:
    """Print a first line in a terminal, because the next imports take seconds. The chat starts quickly anyway."""
    if err.is_terminal and name != "chat":
        err.print(f"[dim]microscale {name} {__version__} starts …[/]")


def load(name: str) -> Any:
    return load_command(name, COMMANDS[name])


app = typer.Typer(
    cls=Commands,
    name="microscale",
    help="Inference for mixture-of-experts models in microscaling formats (MXFP4, MXFP8, NVFP4).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the import for drawing boxes takes longer than the rest of --help
    context_settings=HELP_OPTIONS,
)
Commands.list_in(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"microscale {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line: errors raised on purpose, and a full disk or a closed pipe, become one sentence."""
    settings.limit_spinning()
    sys.unraisablehook = repeat_interrupt
    try:
        app()
    except (MicroscaleError, OSError) as error:
        if _wants_traceback():
            raise
        print_error(err, str(error))
        sys.exit(1)


def repeat_interrupt(ignored: Any) -> None:
    """Python ignores a Ctrl-C that arrives while it collects garbage, and prints a traceback; send it again instead."""
    if ignored.exc_type is KeyboardInterrupt:
        threading.Timer(0.05, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(ignored)


def _wants_traceback() -> bool:
    try:
        return settings.load().debug
    except BadSetting:
        return False
