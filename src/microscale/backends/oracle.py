"""``decide``: which implementation runs a spec on a GPU. Pure: no device, no state, no environment.

Candidates that support the spec are ranked by predicted time: the cost's floor on the card over the efficiency that the
implementation states. A layer runs at several batch sizes from one copy of its weights, so ``decide_layer`` first
chooses the physical layout that is fastest over all of them and then, within it, the best for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from microscale.backends import registry
from microscale.backends.decision import Decision, Rejected
from microscale.errors import Unsupported
from microscale.hardware import Gpu
from microscale.kernels.op import Implementation


class Spec(Protocol):
    """What every op's spec has: the number of tokens is the shape bucket."""

    @property
    def tokens(self) -> int: ...


@dataclass(frozen=True)
class Wish:
    """What the user asked for. A wish is met or refused with a reason; it is never changed in silence."""

    backend: str | None = None
    """``--backend``: one implementation for every op that has it (``reference`` runs everything on plain torch)."""
    moe_backend: str | None = None
    """``--moe-backend``: the expert layers alone."""

    def for_op(self, op: str) -> str | None:
        if op == "moe" and self.moe_backend is not None:
            return self.moe_backend
        has_it = any(entry.name == self.backend for entry in registry.of_op(op))
        return self.backend if has_it else None

    def check(self) -> None:
        """Refuse names that no op knows."""
        if self.backend is not None and self.backend not in registry.names():
            raise Unsupported(f"Unknown backend {self.backend!r}; known are {', '.join(registry.names())}.")
        if self.moe_backend is not None:
            registry.find("moe", self.moe_backend)


def _candidates(
    op: str, specs: Sequence[Spec], gpu: Gpu, wish: Wish
) -> tuple[list[Implementation[Any]], list[Rejected]]:
    """Implementations that can run every spec, and those that cannot or were not asked for."""
    wanted = wish.for_op(op)
    able: list[Implementation[Any]] = []
    rejected: list[Rejected] = []
    for entry in registry.of_op(op):
        reason = next((r for r in (entry.supports(spec, gpu) for spec in specs) if r is not None), None)
        if wanted is not None and entry.name != wanted:
            reason = f"{wanted} was asked for"
        elif wanted is not None and reason is not None:
            raise Unsupported(f"{op} cannot run on {wanted!r} with {gpu.name}: {entry.name} {reason}.")
        if reason is None:
            able.append(entry)
        else:
            rejected.append(Rejected(entry.name, reason))
    if not able:
        reasons = "; ".join(f"{r.name} {r.reason}" for r in rejected)
        raise Unsupported(f"No implementation of {op} runs this on {gpu.name}: {reasons}.")
    return able, rejected


def decide_layer(op: str, layer: str, specs: Sequence[Spec], gpu: Gpu, wish: Wish) -> list[Decision]:
    """One decision per spec (the same layer at several batch sizes), all on one layout of the weights."""
    able, rejected = _candidates(op, specs, gpu, wish)
    times = {entry.name: [entry.cost(spec, gpu).predicted_us(gpu) for spec in specs] for entry in able}
    layouts: dict[str, list[Implementation[Any]]] = {}
    for entry in able:
        layouts.setdefault(entry.layout, []).append(entry)
    best_layout = min(layouts, key=lambda name: _layout_time([times[e.name] for e in layouts[name]]))
    decisions = []
    for index, spec in enumerate(specs):
        time = {entry.name: times[entry.name][index] for entry in able}
        best, chosen = min((time[entry.name], entry.name) for entry in layouts[best_layout])
        losers = [_lost(e, time[e.name], best, best_layout) for e in able if e.name != chosen]
        decisions.append(Decision(op, layer, spec.tokens, chosen, (*losers, *rejected), best))
    return decisions


def _layout_time(times: list[list[float]]) -> float:
    """How slow a layout is when each batch size takes its best; sizes count alike, so the sum is of logarithms."""
    return math.fsum(math.log(min(column)) for column in zip(*times, strict=True))


def _lost(entry: Implementation[Any], time: float, best: float, layout: str) -> Rejected:
    if time >= best:
        return Rejected(entry.name, f"slower: {time:.3g} µs against {best:.3g}")
    return Rejected(entry.name, f"reads the layout {entry.layout!r}, and {layout!r} is faster over all batch sizes")


def decide(op: str, layer: str, spec: Spec, gpu: Gpu, wish: Wish) -> Decision:
    """The decision for one spec."""
    return decide_layer(op, layer, [spec], gpu, wish)[0]
