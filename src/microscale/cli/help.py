"""What ``--help`` of a command looks like, and the groups of its options.

Each option is two lines: its name with what it takes, and what it means. A table would cut the names of our options in
a terminal of 80 columns, and the import for drawing boxes takes longer than the rest of ``--help``.
"""

from __future__ import annotations

import re
import textwrap
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand

TITLES = (
    "Question", "Model", "Network", "Device", "Precision", "Memory", "Batching", "Sampling", "Speculation",
    "Several GPUs", "Limits", "Measurement", "Output",
)  # fmt: skip
"""The groups in the order in which ``--help`` shows them."""
REST = "Other"
"""The group of ``--help``."""


def _group(title: str) -> Any:
    """``typer.Option`` for the options of one group."""
    assert title in TITLES
    return partial(typer.Option, rich_help_panel=title)


question_option = _group("Question")
model_option = _group("Model")
device_option = _group("Device")
precision_option = _group("Precision")
memory_option = _group("Memory")
batching_option = _group("Batching")
sampling_option = _group("Sampling")
speculation_option = _group("Speculation")
gpus_option = _group("Several GPUs")
network_option = _group("Network")
limit_option = _group("Limits")
measurement_option = _group("Measurement")
output_option = _group("Output")

_KINDS = {
    "<int>": "N", "<int range>": "N", "<float>": "NUMBER", "<float range>": "NUMBER", "<str>": "TEXT",
    "<list[str]>": "TEXT", "<path>": "PATH",
}  # fmt: skip


class HelpCommand(TyperCommand):
    """A command whose help shows its options in groups."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        given = [each for each in self.get_params(ctx) if each.param_type_name == "argument"]
        names = [(_argument(each), each.required) for each in given]
        return ["[OPTIONS]", *(name if required else f"[{name}]" for name, required in names)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[Any]] = {title: [] for title in ("Arguments", *TITLES, REST)}
        for parameter in self.get_params(ctx):
            if not getattr(parameter, "hidden", False):
                groups[_title(parameter)].append(parameter)
        for title, parameters in groups.items():
            if parameters:
                with formatter.section(title):
                    for parameter in parameters:
                        _write(formatter, *described(parameter, ctx))


def _argument(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _title(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return "Arguments"
    return getattr(parameter, "rich_help_panel", None) or REST


def described(parameter: Any, ctx: Any) -> tuple[str, str]:
    """An option as the user types it, with what it takes; and what it means."""
    name, meaning = parameter.get_help_record(ctx)
    name, space, kind = name.partition(" <")
    if space:
        name += " " + _KINDS.get(f"<{kind}", kind.rstrip(">"))
    if parameter.param_type_name == "argument":
        name = _argument(parameter)
    text, _, facts = re.sub(r"(?: {2}|^)\[([^][]*)\]$", r"\0\1", meaning).partition("\0")
    for fact in facts.split("; "):
        if fact.startswith("default: "):
            text += f" Default: {_switched(parameter, fact[9:])}."
        elif limits := re.fullmatch(r"([\d.]+)<=x<=([\d.]+)", fact):
            text += f" From {limits[1]} to {limits[2]}."
    return name, text


def _switched(parameter: Any, default: str) -> str:
    return ("on" if parameter.default else "off") if getattr(parameter, "secondary_opts", ()) else default


def _write(formatter: Any, name: str, meaning: str) -> None:
    formatter.write(f"{'':{formatter.current_indent}}{name}\n")
    indent = " " * (formatter.current_indent + 4)
    text = textwrap.fill(
        meaning, formatter.width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    formatter.write(f"{text}\n")
