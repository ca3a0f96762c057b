"""Groups of commands whose modules are imported when a command is called, so that ``--help`` is quick.

Other packages add commands by entry points. The names and summaries of ``microscale-lab`` are listed here, so
``--help`` imports nothing of it, and without the lab its commands tell the user to install it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperGroup

from microscale.cli.help import HelpCommand
from microscale.errors import Unsupported

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
LAB = {
    "microscale.commands": {
        "report": "Check and time every kernel on this GPU; write a report.",
        "profile": "Show where the time of one decoding step and one prompt goes.",
        "quality": "Measure how each precision changes the answers, against float32.",
        "tune": "Find the fastest tile sizes on this machine's GPU.",
        "prove": "Compile every kernel for every architecture, without a GPU.",
    },
    "microscale.bench_commands": {
        "kernels": "Time kernels on this machine's GPU.",
        "load": "Measure how fast a checkpoint is loaded.",
        "speculative": "Measure steps with drafts of which a set share is accepted.",
        "sweep": "Measure a model over precisions, batch sizes, contexts and prompts.",
        "fit": "Show how well the measured rows predict rows that were left out.",
    },
}
"""Entry-point group → the lab's commands in it, with their summaries."""


class Place(NamedTuple):
    """Where a command is, and its summary in ``--help``."""

    target: str
    """``module:function``, where the function may also be a group."""
    summary: str
    settings: Mapping[str, Any] = MappingProxyType({})
    """Click's context settings."""


def with_installed(own: dict[str, Place], group: str) -> dict[str, Place]:
    """Our own commands, then those of installed packages."""
    added = {entry.name: entry.value for entry in entry_points(group=group)}
    order = sorted(added, key=[*LAB[group], *added].index)
    return own | {name: Place(added[name], LAB[group].get(name, f"From {added[name]}.")) for name in order}


def load_command(name: str, place: Place) -> Any:
    """Import a command: a function, or a group of its own."""
    module, _, function = place.target.partition(":")
    command = getattr(importlib.import_module(module), function)
    if not isinstance(command, typer.Typer):
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name, cls=HelpCommand, context_settings={**HELP_OPTIONS, **place.settings})(command)
        command = alone
    command = typer.main.get_command(command)
    command.name = name
    return command


class LazyGroup(TyperGroup):
    """Lists the commands by their summaries and imports only the one that is called."""

    places: ClassVar[dict[str, Place]]
    entry_group: ClassVar[str]

    def has(self, name: str) -> bool:
        """Whether there is such a command, here or in the lab."""
        return name in self.places or name in LAB[self.entry_group]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in self.places and name in LAB[self.entry_group]:
            raise Unsupported(
                f"`{ctx.command_path} {name}` is in a package that is not installed; get it with "
                "`make install` in a checkout, or install its wheel"
            )
        found, command, rest = super().resolve_command(ctx, args)
        return (name, load_command(name, self.places[name]), rest) if name in self.places else (found, command, rest)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, place.summary) for name, place in self.places.items()])

    @classmethod
    def list_in(cls, app: typer.Typer) -> None:
        """Add a line for each command to the overview of ``app``."""
        for name, place in cls.places.items():
            app.command(name, help=place.summary)(_listed)


def _listed() -> None:
    """A placeholder in the overview until the command is called."""
