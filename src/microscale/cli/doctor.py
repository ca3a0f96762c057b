"""``microscale doctor``: what this machine has."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from microscale import settings
from microscale.cli.console import out, print_json
from microscale.cli.help import output_option


def doctor(
    as_json: Annotated[bool, output_option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Show what this machine has, what is missing, and how to fix it.

    This needs no GPU. The exit status is 1 if something is broken.
    """
    from microscale import doctor as doctor_module

    settings.load()
    findings = doctor_module.examine()
    if as_json:
        print_json(doctor_module.to_json(findings))
    else:
        colours = {"ok": "green", "note": "yellow", "broken": "red"}
        table = Table(box=None, pad_edge=False, show_header=False)
        for _ in range(3):
            table.add_column(overflow="fold")
        for finding in findings:
            table.add_row(f"[{colours[finding.status]}]{finding.status}[/]", finding.name, escape(finding.value))
            if finding.fix:
                table.add_row("", "", escape(f"fix: {finding.fix}"))
        out.print(table)
    raise typer.Exit(0 if doctor_module.healthy(findings) else 1)
