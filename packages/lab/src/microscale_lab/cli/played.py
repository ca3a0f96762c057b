"""``--as CARD``: a command runs another card's kernels on this GPU, and labels every figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

from microscale.cli.help import device_option

AsOption = Annotated[
    str | None,
    device_option("--as", help="Run this card's kernels (gb10, rtx4090 …) on this GPU. Times are not that card's."),
]


@contextmanager
def played_card(name: str | None) -> Iterator[str | None]:
    """Inside, kernels are those of the card. Gives the label of its figures; ``None`` where no card is named."""
    if name is None:
        yield None
        return
    from microscale.hardware import known
    from microscale_lab.prove.bridge import as_card, label

    card = known(name)
    with as_card(card) as executed:
        yield label(card, executed)


def labelled(rows: Sequence[dict[str, object]], label: str | None) -> list[dict[str, object]]:
    """Rows for JSON: each says that it was taken as another card, where it was."""
    return [row if label is None else {**row, "as": label} for row in rows]
