"""How far a rank is, for its heartbeat. Nothing here imports torch."""

from __future__ import annotations

from typing import Protocol


class Counts(Protocol):
    calls: int


class Progress:
    """The step that a rank is in, and how many sums it has begun."""

    def __init__(self) -> None:
        self.number = 0
        self.group: Counts | None = None

    @property
    def calls(self) -> int:
        return 0 if self.group is None else self.group.calls
