"""What was chosen, what was not, and why: as records, as text, as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rejected:
    """An implementation that will not run, and the reason in one clause."""

    name: str
    reason: str


@dataclass(frozen=True)
class Decision:
    """Who runs one op of one layer kind for up to ``tokens`` tokens."""

    op: str
    layer: str
    tokens: int
    chosen: str
    rejected: tuple[Rejected, ...]
    predicted_us: float
    tuned: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Plan:
    """All decisions of one loaded model. Grows while the model binds its layers, then stays."""

    decisions: dict[tuple[str, str, int], Decision] = field(default_factory=dict)

    def add(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            self.decisions.setdefault((decision.op, decision.layer, decision.tokens), decision)

    def to_json(self) -> list[dict[str, Any]]:
        return [decision.to_json() for decision in self.decisions.values()]
