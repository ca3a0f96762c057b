"""Options of commands that plan for a card, which need not be here. Apart from the others: a server knows no cards."""

from __future__ import annotations

from typing import Annotated

import typer

from microscale import hardware

PlannedModelArgument = Annotated[
    str, typer.Argument(help="A preset (gpt-oss-120b, gemma-4-26b-a4b …), demo, a checkpoint folder or a hub id.")
]
CardOption = Annotated[
    str | None, typer.Option(help=f"A known card: {', '.join(hardware.KNOWN)}. This machine's without.")
]
