"""Shows what was proved: a table for the terminal, JSON for programs, Markdown for ``docs/kernels.md``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import triton
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from microscale_lab.prove.run import ProofRow
from ptxproof.targets import target

T = TypeVar("T")
HEADINGS = ("module", "kernels", "matrix instruction", "shared", "registers", "spills", "ok")
NUMBERS = ("kernels", "shared", "registers", "spills")


@dataclass(frozen=True)
class ProofLine:
    """One line of a table: a single kernel, or all of a module's on one SM, by their worst figures."""

    kernel: str
    rows: tuple[ProofRow, ...]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def cells(self) -> tuple[str, ...]:
        """A text for each of ``HEADINGS``."""
        failed = sum(not row.ok for row in self.rows)
        return (
            self.kernel,
            str(len(self.rows)),
            ", ".join(sorted({name for row in self.rows for name in row.mma})) or "-",
            _largest(row.shared for row in self.rows),
            _largest(row.registers for row in self.rows),
            _largest(row.spill_bytes for row in self.rows),
            "yes" if self.ok else "no" if failed == len(self.rows) else f"{failed} not",
        )


def _largest(values: Iterable[int | None]) -> str:
    known = [value for value in values if value is not None]
    return str(max(known)) if known else "-"


def lines(rows: Sequence[ProofRow], *, every_kernel: bool) -> list[ProofLine]:
    """The lines of one table, for the rows of one op on one SM."""
    if every_kernel:
        return [ProofLine(row.variant, (row,)) for row in rows]
    return [ProofLine(name, tuple(of_name)) for name, of_name in _grouped(rows, lambda row: row.variant.split("/")[0])]


def print_tables(rows: Sequence[ProofRow], console: Console) -> None:
    """A table per op and SM, with every kernel if there is but one SM; then each refusal with its reason."""
    every_kernel = len({row.sm for row in rows}) == 1
    shown = [heading for heading in HEADINGS if heading != "kernels" or not every_kernel]
    for (op, sm), of_table in _grouped(rows, lambda row: (row.op, row.sm)):
        title = f"{op} on {target(sm).label}, {target(sm).shared_limit} bytes of shared memory a block"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in shown:
            numeric = heading in NUMBERS
            table.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
        for line in lines(of_table, every_kernel=every_kernel):
            cells = dict(zip(HEADINGS, line.cells(), strict=True))
            table.add_row(*(Text(cells[heading]) for heading in shown), style=None if line.ok else "red")
        console.print(table)
    for sentence in refusals(rows):
        console.out(f"✗ {sentence}", highlight=False)
    console.out(summary(rows), highlight=False)


def refusals(rows: Sequence[ProofRow]) -> Iterator[str]:
    """A sentence for each fault on each SM, with the first of the kernels that have it."""
    refused = [row for row in rows if not row.ok]
    for (op, sm, reason), alike in _grouped(refused, lambda row: (row.op, row.sm, row.reason)):
        others = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        yield f"{op} {alike[0].variant}{others} on {target(sm).label}: {reason}"


def summary(rows: Sequence[ProofRow]) -> str:
    """One sentence on the whole."""
    architectures = ", ".join(target(sm).label for sm in sorted({row.sm for row in rows}))
    failed = sum(not row.ok for row in rows)
    verdict = "all proved" if failed == 0 else f"{failed} refused"
    return f"{len(rows)} kernels compiled for {architectures} with Triton {triton.__version__}: {verdict}."


def as_json(rows: Sequence[ProofRow]) -> str:
    return json.dumps([dataclasses.asdict(row) for row in rows], indent=1)


def as_markdown(rows: Sequence[ProofRow]) -> str:
    """A section with a table per op: each module's kernels on each SM by their worst figures, then the notes."""
    headings = ("SM", *HEADINGS, "shared limit")
    parts = [f"## Triton {triton.__version__}", "", summary(rows), ""]
    for op, of_op in _grouped(rows, lambda row: row.op):
        parts += [f"### `{op}`", "", f"| {' | '.join(headings)} |", f"|{' --- |' * len(headings)}"]
        for sm, of_sm in _grouped(of_op, lambda row: row.sm):
            label, limit = target(sm).label.removeprefix("SM "), str(target(sm).shared_limit)
            for line in lines(of_sm, every_kernel=False):
                parts.append(f"| {' | '.join((label, *line.cells(), limit))} |")
        notes = [f"- {row.variant} on {target(row.sm).label}: {row.reason}" for row in of_op if row.reason]
        parts += ["", *notes, ""] if notes else [""]
    return "\n".join(parts)


def _grouped(rows: Sequence[ProofRow], key: Callable[[ProofRow], T]) -> Iterator[tuple[T, list[ProofRow]]]:
    """Rows with the same key together, in the order in which the keys first appear."""
    order: dict[T, list[ProofRow]] = {}
    for row in rows:
        order.setdefault(key(row), []).append(row)
    return iter(order.items())
