"""Several cards or precisions next to each other, in one table."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich.markup import escape

from microscale.engine.loading.fit import gib
from microscale.engine.loading.precisions import costs_text
from microscale.explain.answer import BASES, best_published, others_text
from microscale.explain.report import Report
from microscale.explain.speed_text import WIDTH, rate_cell, sequences_text, time_text

INTERVAL = "90 % intervals in parentheses"


def compare_lines(reports: Sequence[Report]) -> Iterator[str]:
    """A row for each report; no speed for a model that does not fit."""
    first = reports[0]
    asked = f"{sequences_text(first.question.batch)} after {first.memory.context} tokens"
    yield f"[bold]{escape(first.outline.name)}[/], {asked}; {INTERVAL}"
    yield ""
    rows = [("card", "precision", "GiB", "tokens per second", "first token"), *map(_row, reports)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for index, cells in enumerate(rows):
        padded = [
            f"{cell:<{width}}" if at < 2 else f"{cell:>{width}}"
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        line = escape("  ".join(padded).rstrip())
        yield f"[bold]{line}[/]" if index == 0 else line
    yield ""
    for note in dict.fromkeys(_notes(reports)):
        yield from (escape(line) for line in textwrap.wrap(note, WIDTH, subsequent_indent="  "))


def _row(report: Report) -> tuple[str, ...]:
    memory, asked, prompt = report.memory, report.asked, report.prompt
    if report.setup.gpu.is_cpu:  # its times only rank kernels
        asked = prompt = None
    missing = "does not fit" if report.refusal is not None else "not predicted"
    size = f"{gib(memory.needed)} of {gib(memory.usable)}"
    speed = missing if asked is None else rate_cell(asked)
    first_token = "-" if prompt is None else time_text(prompt.us)
    return _card(report), report.setup.precision.name, size, speed, first_token


def _card(report: Report) -> str:
    return report.setup.gpu.name.partition(" (")[0].removeprefix("NVIDIA ").removeprefix("GeForce ")


def _notes(reports: Sequence[Report]) -> Iterator[str]:
    """What the speeds are based on, what precisions cost, what others publish."""
    shown = [(report, report.asked.basis) for report in reports if report.asked and not report.setup.gpu.is_cpu]
    for basis in dict.fromkeys(basis for _, basis in shown):
        yield f"{', '.join(dict.fromkeys(_card(report) for report, own in shown if own is basis))}: {BASES[basis]}"
    if any(report.setup.precision.name != "exact" for report in reports):
        yield from (costs_text(report.outline.name, report.offers) for report in reports if report.offers)
    for report in reports:
        row = best_published(report)
        if row is not None:
            yield f"{_card(report)}: {others_text(row)}"
