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


def print_rows(rows: Sequence[RunRow], console: Console) -> None:
    """The table, then each fault and what was not executed, with the reason."""
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


def print_end(rows: Sequence[RunRow], selected: Selection, console: Console) -> None:
    """What was left out and why, a line per op and reason; then what was right."""
    cards: dict[tuple[str, str], Counter[str]] = {}
    for gpu, case, reason, _ in selected.left_out:
        cards.setdefault((case.op, reason), Counter())[gpu.name] += 1
    for (op, reason), counts in sorted(cards.items()):
        of_cards = ", ".join(f"{count} of {card}" for card, count in counts.items())
        console.out(f"· left out, {op}: {of_cards}: {reason}", highlight=False)
    console.out(summary(rows, selected), highlight=False)


def _cells(row: RunRow) -> tuple[str, ...]:
    spelled = ", ".join(f"{form} {count}" for form, count in row.spelled.most_common()) or "-"
    verdict = "yes" if row.ok else f"{len(row.failed)} not" if row.failed else "not run"
    figures = (_figure(row.worst), _figure(row.rms))
    return row.op, row.variant, ", ".join(row.cards), str(row.kernels), str(row.cases), *figures, spelled, verdict


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"


def not_run(rows: Sequence[RunRow], selected: Selection) -> dict[str, list[str]]:
    """Card → its variants of which no case ran; every card that has cases is there."""
    entries = [entry for row in rows for entry in row.entries]
    ran = {(e.gpu.name, e.unit.case.op, e.variant) for e in entries if e.outcome.left_out is None}
    has = {(e.gpu.name, e.unit.case.op, e.variant) for e in entries}
    has |= {(gpu.name, case.op, variant) for gpu, case, _, variant in selected.left_out if variant is not None}
    found: dict[str, list[str]] = {card: [] for card, _, _ in sorted(has)}
    for card, op, variant in sorted(has - ran):
        found[card].append(f"{op} {variant}")
    return found


def summary(rows: Sequence[RunRow], selected: Selection) -> str:
    """What was right, for the cards of which every variant ran; then the others, with what did not run."""
    if not any(row.ran for row in rows):
        return "Nothing was executed."
    units = {id(entry.unit): entry for row in rows for entry in row.ran}
    failed = {id(entry.unit) for row in rows for entry in row.failed}
    missing = not_run(rows, selected)
    whole = ", ".join(card for card, variants in missing.items() if not variants)
    where = " and ".join(dict.fromkeys(row.executed_on for row in rows)) or "nothing"
    verdict = "all as the reference says" if not failed else f"{len(failed)} not as the reference says"
    sentences = [f"{kernels_of(units.values())} kernels executed in {len(units)} cases on {where}: {verdict}."]
    sentences += [f"Every variant ran of {whole}."] if whole else []
    sentences += [
        f"Not every variant ran of {card}; without {len(variants)}: {'; '.join(variants)}."
        for card, variants in missing.items() if variants
    ]  # fmt: skip
    return "\n".join(sentences)
