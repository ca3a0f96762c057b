"""Speeds of a model on several ranks: one rank's own time plus its sums over all ranks, which wait for the link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from microscale.engine.predictions import Phase, Point
from microscale.hardware.links import CardLink, Wait


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
    """From the slowest to the fastest published time of a sum, and over the rank's own interval if it has one."""

    def to_json(self) -> dict[str, Any]:
        own = self.point.to_json()
        case = {name: own[name] for name in ("batch", "context", "tokens") if name in own}
        figures = {"sum_us": self.wait.us, "tok_s": self.tok_s, "low": self.low, "high": self.high}
        return case | {name: round(value, 1) for name, value in figures.items()}


def with_sums(point: Point, link: CardLink, world: int, sums: int, row_bytes: int, step_tokens: int) -> JoinedPoint:
    """``sums``: of one step, each of a row of ``row_bytes`` for every token. Prompts take several steps where they are
    longer than ``step_tokens``."""
    tokens = point.context if point.kind is Phase.PREFILL else point.batch
    steps, rest = divmod(tokens, step_tokens)
    waits = [link.wait(step_tokens * row_bytes, world)] * steps + [link.wait(rest * row_bytes, world)] * bool(rest)
    fast_us, slow_us = sums * sum(wait.low for wait in waits), sums * sum(wait.high for wait in waits)

    def rate(own: float | None, sums_us: float) -> float:
        own_us = point.us if own is None else tokens / own * 1e6
        return tokens / (own_us + sums_us) * 1e6

    middle = rate(None, (fast_us + slow_us) / 2)
    return JoinedPoint(point, waits[0], middle, rate(point.low, slow_us), rate(point.high, fast_us))
