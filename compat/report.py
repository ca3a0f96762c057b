"""Results as a table: on the terminal, and in ``docs/clients.md`` between its markers."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from compat.table import Client

BEGIN = "<!-- table: written by make test-clients -->"
END = "<!-- end of table -->"
HEADER = "| client | version | what was run | result | repeat it |\n| --- | --- | --- | --- | --- |"


class Status(Enum):
    WORKS = "works"
    FAILS = "fails"
    NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True)
class Result:
    client: Client
    status: Status
    checks: tuple[Check, ...] = ()
    seconds: float = 0.0
    reason: str = ""

    @property
    def short(self) -> str:
        good = sum(check.ok for check in self.checks)
        if self.status is Status.WORKS:
            return f"works, {good} of {len(self.checks)}"
        failed = [check.name for check in self.checks if not check.ok]
        return ": ".join(filter(None, [self.status.value, self.reason or "; ".join(failed)]))

    def as_json(self) -> dict[str, Any]:
        return {
            "client": self.client.name,
            "version": self.client.version,
            "status": self.status.value,
            "seconds": round(self.seconds, 1),
            "reason": self.reason,
            "checks": [asdict(check) for check in self.checks],
        }


def lines(results: list[Result]) -> list[str]:
    rows = [("client", "version", "checks", "seconds", "result")]
    rows += [(r.client.name, r.client.version, str(len(r.checks)), f"{r.seconds:.0f}", r.short) for r in results]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows]


def row(result: Result) -> str:
    client = result.client
    ran = "; ".join(check.name for check in result.checks) or "nothing"
    if client.note:
        ran += f" ({client.note})"
    cells = [client.name, client.version, ran, result.short, f"`make test-clients ARGS='--only {client.name}'`"]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def rewrite(page: Path, results: list[Result], clients: tuple[Client, ...]) -> None:
    """Rows of what ran now; the others stay as they are. Clients that are no more in the table lose theirs."""
    text = page.read_text()
    before, found, rest = text.partition(BEGIN)
    table, found_end, after = rest.partition(END)
    if not (found and found_end):
        raise ValueError(f"{page} lacks the markers of its table")
    rows = {match[1]: match[0] for match in re.finditer(r"^\| ([\w-]+) \| .*$", table, re.MULTILINE)}
    rows |= {result.client.name: row(result) for result in results}
    kept = "\n".join(rows[client.name] for client in clients if client.name in rows)
    page.write_text(f"{before}{BEGIN}\n\n{HEADER}\n{kept}\n\n{END}{after}")
