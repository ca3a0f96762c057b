"""Options of commands that plan for a card, which need not be in this machine."""

from __future__ import annotations

from typing import Annotated

import typer

PlannedModelArgument = Annotated[
    str, typer.Argument(help="A preset (gpt-oss-120b, gemma-4-26b-a4b …), demo, a checkpoint folder or a hub id.")
]
CardOption = Annotated[str | None, typer.Option(help="A known card (h200, rtx5090, gb10 …). This machine's without.")]
