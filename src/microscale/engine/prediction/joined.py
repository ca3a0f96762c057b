"""Speeds of a model on several ranks: one rank's own time, and its sums, which wait for the link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from microscale.engine.prediction.points import Point
from microscale.hardware.links import Link, Wait
from microscale.hardware.whole_models import Kind


@dataclass(frozen=True)
class JoinedPoint:
    """A point with its sums."""

    point: Point
    """One rank's own."""
    wait: Wait
    """Of one sum."""
    tok_s: float
    low: float
    high: float

    def to_json(self) -> dict[str, Any]:
        own = self.point.to_json()
        case = {name: own[name] for name in ("batch", "context", "tokens") if name in own}
        figures = {"sum_us": self.wait.us, "tok_s": self.tok_s, "low": self.low, "high": self.high}
        return case | {name: round(value, 1) for name, value in figures.items()}


def with_sums(point: Point, link: Link, world: int, sums: int, row_bytes: int, step_tokens: int) -> JoinedPoint:
    """``sums``: of one step, each of a row of ``row_bytes`` for every token. Prompts take several steps where they are
    longer than ``step_tokens``."""
    tokens = point.context if point.kind is Kind.PREFILL else point.batch
    steps, rest = divmod(tokens, step_tokens)
    waits = [link.wait(step_tokens * row_bytes, world)] * steps + [link.wait(rest * row_bytes, world)] * bool(rest)
    low_us, high_us = (sums * sum(ends) for ends in zip(*((each.low, each.high) for each in waits), strict=True))
    own = [tokens / rate * 1e6 for rate in (point.tok_s, point.low, point.high)]
    added = ((low_us + high_us) / 2, high_us, low_us)
    return JoinedPoint(point, waits[0], *(tokens / (us + more) * 1e6 for us, more in zip(own, added, strict=True)))
