"""``microscale doctor``: what this machine has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from microscale import settings
from microscale.cli.console import out, print_json
from microscale.cli.nodes import MASTER_PORT, MasterPortOption, RankSecretOption
from microscale.errors import BadSetting
from microscale.parallel.handshake import read_secret

if TYPE_CHECKING:
    from microscale.doctor import Finding


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    peer: Annotated[
        str, typer.Option(help="The address of another machine that waits with --peer-listen: can both share a model?")
    ] = "",
    peer_listen: Annotated[str, typer.Option(help="Wait for the other machine at this address of ours.")] = "",
    master_port: MasterPortOption = MASTER_PORT,
    rank_secret_file: RankSecretOption = None,
) -> None:
    """Say what this machine has, what is missing, and how to mend it.

    The exit status is 1 when something is broken. No GPU is needed.
    """
    from microscale import doctor as doctor_module

    settings.load()
    findings = doctor_module.examine()
    if peer or peer_listen:
        findings = [*findings, *examine_peer(peer, peer_listen, master_port, rank_secret_file)]
    if as_json:
        print_json(doctor_module.to_json(findings))
    else:
        colours = {"ok": "green", "note": "yellow", "broken": "red"}
        table = Table(box=None, pad_edge=False, show_header=False)
        for _ in range(3):
            table.add_column(overflow="fold")
        for finding in findings:
            table.add_row(f"[{colours[finding.status]}]{finding.status}[/]", finding.name, escape(finding.value))
            if finding.mend:
                table.add_row("", "", escape(f"mend: {finding.mend}"))
        out.print(table)
    raise typer.Exit(0 if doctor_module.healthy(findings) else 1)


def examine_peer(peer: str, listen: str, port: int, secret_file: Path | None) -> list[Finding]:
    """What two machines say of each other, and of what is between them."""
    # It needs torch.distributed and the messages' package, which a look at this machine does without.
    from microscale.doctor import Finding, Status
    from microscale.engine.ranks import peer as ranks

    if peer and listen:
        raise BadSetting("--peer is for one machine and --peer-listen for the other.")
    if secret_file is None:
        raise BadSetting("--peer needs --rank-secret-file: a file with a secret that both machines have.")
    secret = read_secret(secret_file)
    found = ranks.visit(peer, port, secret) if peer else ranks.host(listen, port, secret)
    return [Finding(each.name, Status.NOTE if each.mend else Status.OK, each.value, each.mend) for each in found]
