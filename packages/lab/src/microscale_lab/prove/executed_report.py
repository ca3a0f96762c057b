"""Shows what was executed: a row per op, variant and SM, as JSON for programs and as a table for the terminal."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from microscale.kernels.launch import Kernel
from microscale_lab.prove.execute import ExecutedCase
from microscale_lab.prove.selection import Selection
from ptxproof.targets import target

KEYS = ("op", "variant", "sm", "executed_on", "cases", "worst", "rms", "ok", "reason")
"""Of ``prove --run --json``."""


@dataclass(frozen=True)
class RunRow:
    """All cases of one variant on one SM."""

    op: str
    variant: str
    sm: int
    executed_on: str
    cards: tuple[str, ...]
    entries: tuple[ExecutedCase, ...]

    @property
    def ran(self) -> list[ExecutedCase]:
        """What was executed: cards that started the same kernels share it."""
        once = {id(entry.unit): entry for entry in self.entries if entry.outcome.left_out is None}
        return list(once.values())

    @property
    def cases(self) -> int:
        return len(self.ran)

    @property
    def failed(self) -> list[ExecutedCase]:
        return [entry for entry in self.ran if entry.outcome.fault is not None]

    @property
    def ok(self) -> bool:
        """Something was executed, and all of it was right."""
        return bool(self.ran) and not self.failed

    @property
    def worst(self) -> float | None:
        return _finite(max((entry.outcome.worst for entry in self.ran), default=None))

    @property
    def rms(self) -> float | None:
        return _finite(max((entry.outcome.rms for entry in self.ran), default=None))

    @property
    def kernels(self) -> int:
        return kernels_of(self.ran)

    @property
    def spelled(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for entry in self.ran:
            total.update(entry.outcome.spelled)
        return total

    @property
    def reason(self) -> str | None:
        """What failed, what was not executed, and as what it ran, where that was another card."""
        parts = []
        if failed := self.failed:
            more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
            parts.append(f"{failed[0].unit.case.name}{more}: {failed[0].outcome.fault}")
        left = Counter(entry.outcome.left_out for entry in self.entries if entry.outcome.left_out is not None)
        parts += [f"{count} not executed: {why}" for why, count in left.items()]
        others = {entry.unit.gpu.sm for entry in self.ran} - {self.sm}
        parts += [f"{target(self.sm).label}'s PTX is {target(sm).label}'s but for its header, and ran as that"
                  for sm in others]  # fmt: skip
        return ". ".join(part.rstrip(".") for part in parts) + "." if parts else None

    def to_json(self) -> dict[str, object]:
        return {key: getattr(self, key) for key in KEYS}


def kernels_of(entries: Iterable[ExecutedCase]) -> int:
    """Different kernels that ran. Where it was not listed beforehand what a case starts, those that it was first to
    start in its process count."""
    listed: set[tuple[int, Kernel]] = set()
    unlisted = 0
    for entry in entries:
        listed |= {(entry.unit.gpu.sm, kernel) for kernel in entry.unit.kernels}
        unlisted += 0 if entry.unit.launches else entry.outcome.kernels
    return len(listed) + unlisted


def _finite(value: float | None) -> float | None:
    """JSON has no NaN; what is none of its numbers has failed, and the reason says how."""
    return value if value is not None and math.isfinite(value) else None


def rows_of(executed: Sequence[ExecutedCase], executed_on: str) -> list[RunRow]:
    """By op, variant and SM. Cards of one SM are together."""
    together: dict[tuple[str, str, int], list[ExecutedCase]] = {}
    for entry in executed:
        together.setdefault((entry.unit.case.op, entry.variant, entry.gpu.sm), []).append(entry)
    rows = []
    for (op, variant, sm), entries in together.items():
        cards = tuple(dict.fromkeys(entry.gpu.name for entry in entries))
        rows.append(RunRow(op, variant, sm, executed_on, cards, tuple(entries)))
    return sorted(rows, key=lambda row: (row.op, row.sm, row.variant))


def as_json(rows: Sequence[RunRow]) -> str:
    return json.dumps([row.to_json() for row in rows], indent=1)


HEADINGS = ("op", "variant", "card", "kernels", "cases", "worst", "RMS", "spelled out", "ok")
NUMBERS = ("kernels", "cases", "worst", "RMS")


def print_rows(rows: Sequence[RunRow], selected: Selection, console: Console) -> None:
    """The table, then each fault and each thing left out with its reason, then one sentence on the whole."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        numeric = heading in NUMBERS
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in _cells(row)), style="red" if row.failed else None)
    console.print(table)
    for row in rows:
        if row.reason:
            sign = "✗" if row.failed else "·"
            console.out(f"{sign} {row.op} {row.variant} on {target(row.sm).label}: {row.reason}", highlight=False)
    for (card, op, reason), count in selected.left_out.items():
        console.out(f"· {count} cases of {op} are none of {card}'s: {reason}", highlight=False)
    console.out(summary(rows), highlight=False)


def _cells(row: RunRow) -> tuple[str, ...]:
    spelled = ", ".join(f"{form} {count}" for form, count in row.spelled.most_common()) or "-"
    verdict = "yes" if row.ok else f"{len(row.failed)} not" if row.failed else "not run"
    figures = (_figure(row.worst), _figure(row.rms))
    return row.op, row.variant, ", ".join(row.cards), str(row.kernels), str(row.cases), *figures, spelled, verdict


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"


def summary(rows: Sequence[RunRow]) -> str:
    """One sentence on the whole."""
    if not any(row.ran for row in rows):
        return "Nothing was executed."
    units = {id(entry.unit): entry for row in rows for entry in row.ran}
    failed = {id(entry.unit) for row in rows for entry in row.failed}
    where = " and ".join(dict.fromkeys(row.executed_on for row in rows)) or "nothing"
    cards = ", ".join(dict.fromkeys(card for row in rows for card in row.cards))
    verdict = "all as the reference says" if not failed else f"{len(failed)} not as the reference says"
    return f"{kernels_of(units.values())} kernels of {cards} executed in {len(units)} cases on {where}: {verdict}."
