"""``microscale bench``: ``bench MODEL``, ``bench serve``, and the benchmarks that other packages add."""

from __future__ import annotations

from typing import Any

import typer

from microscale.cli.group import HELP_OPTIONS, LazyGroup, Place, with_installed

ACCEPTANCE = "--speculative-acceptance"
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Options that ``bench serve`` does not have are passed on to ``serve``."""
COMMANDS = with_installed(
    {
        "model": Place("microscale.cli.bench_model:bench_model", "Measure a model's prefill and decode speed."),
        "serve": Place("microscale.cli.bench_serve:bench_serve", "Start a server and measure it over HTTP.", PASSED_ON),
    },
    "microscale.bench_commands",
)


class ModelOrCommand(LazyGroup):
    """``bench MODEL …`` next to ``bench serve``: a first word that is not a command is the model. ``--serve`` means
    ``serve``, and ``--speculative-acceptance`` means ``speculative``."""

    places = COMMANDS
    entry_group = "microscale.bench_commands"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--serve" in args:
            args = ["serve", *(each for each in args if each != "--serve")]
        elif args[:1] != ["speculative"] and any(each.split("=")[0] == ACCEPTANCE for each in args):
            args = ["speculative", *args]
        if not args or (not self.has(args[0]) and args[0] not in ctx.help_option_names):
            args = ["model", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(
    cls=ModelOrCommand,
    help="Measure a model (bench MODEL) or a server (bench serve).",
    context_settings=HELP_OPTIONS,
    add_completion=False,
    rich_markup_mode=None,
)
ModelOrCommand.list_in(bench)
