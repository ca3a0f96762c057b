"""``decide``: which implementation runs a spec on a GPU. Pure: no device, no state, no environment.

Candidates that support the spec are ranked by predicted time (``estimate``): the cost over the card's ceilings times
the efficiency measured for its family, or stated by the implementation. A layer runs at several batch sizes from one
copy of its weights, so ``decide_layer`` first chooses the physical layout that is fastest over all of them and then,
within it, the best for each. Where activations may be quantised, an implementation that does so must earn it: it
wins only when it is faster by ``WORTH``. So must one whose speed is stated against one whose speed was measured: it
wins only when it is faster by ``DOUBT``. Every candidate that loses keeps the reason, which ``explain`` prints.

Which path runs a batch within the chosen implementation, and why not another, is decided in ``paths``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from microscale.errors import Unsupported
from microscale.hardware import GIB, Gpu
from microscale.kernels.op import Activations, Implementation, Reason
from microscale.planning import paths, registry
from microscale.planning.decision import Decision, Rejected
from microscale.planning.estimate import Estimate, estimate

WORTH = 1.05
"""How many times faster quantised activations must be than exact ones. Below, the gain is less than what benchmarks of
one kernel vary by from run to run."""

WIDE = 4.0
"""How many times slower an implementation may be and still win over one that holds the weights wider than their format.
The reference, which decodes them at every call, never does."""

DOUBT = 1.25
"""How many times faster a stated efficiency must promise to be than a measured one: that much of a promise is often
not kept."""


@dataclass(frozen=True)
class Preference:
    """What the user asked for. A preference is met or refused with a reason; it is never changed in silence."""

    backend: str | None = None
    """``--backend``: one implementation for every op that has it (``reference`` runs everything on plain torch)."""
    moe_backend: str | None = None
    """``--moe-backend``: the expert layers alone."""

    def for_op(self, op: str) -> str | None:
        if op == "moe" and self.moe_backend is not None:
            return self.moe_backend
        has_it = any(entry.name == self.backend for entry in registry.of_op(op))
        return self.backend if has_it else None

    def option(self, op: str) -> str:
        """The option behind ``for_op``."""
        return "--moe-backend" if op == "moe" and self.moe_backend is not None else "--backend"

    def check(self) -> None:
        """Refuse names that no op has."""
        if self.backend is not None and self.backend not in registry.names():
            raise Unsupported(f"Unknown backend {self.backend!r}; known are {', '.join(registry.names())}.")
        if self.moe_backend is not None:
            registry.find("moe", self.moe_backend)


@dataclass(frozen=True)
class Freedom:
    """What a decision may choose apart from the implementation, and needs apart from the spec."""

    activations: tuple[Activations, ...] = ()
    """Formats in which activations may meet the weights, the most exact first; none: the spec's own."""
    copies: int = 1
    """Layers of this kind, each with weights of its own."""
    kv_size: int = 2
    """Bytes of one number in the KV cache."""


@dataclass(frozen=True)
class _Offer:
    """One implementation's best way to run one spec."""

    entry: Implementation[Any]
    spec: Any
    estimate: Estimate
    exactness: int
    """Place of its activations in ``Freedom.activations``: 0 is exact."""
    doubtful: bool = False
    """Its speed is stated while another's was measured."""

    @property
    def rank(self) -> float:
        return self.estimate.us * WORTH**self.exactness * (DOUBT if self.doubtful else 1.0)


_Column = Mapping[str, "_Offer | Reason"]
"""For one batch size: what each implementation offers, or why it cannot."""


def decide_layer(
    op: str, layer: str, specs: Sequence[Any], gpu: Gpu, preference: Preference, freedom: Freedom | None = None
) -> list[Decision]:
    """One decision per spec (the same layer at several batch sizes), all on one layout of the weights."""
    freedom = freedom or Freedom()
    columns: list[_Column] = []
    first = 1
    for spec in specs:
        columns.append({entry.name: _offer(entry, layer, spec, first, gpu, freedom) for entry in registry.of_op(op)})
        first = spec.tokens + 1
    columns = _what_fits(_as_preferred(op, columns, gpu, preference), gpu, freedom)
    columns = [_doubted(column if gpu.is_cpu else _as_narrow(column)) for column in columns]
    layouts = {entry.layout: 0.0 for entry in registry.of_op(op)}
    for layout in layouts:
        layouts[layout] = math.fsum(_log_time(column, layout) for column in columns)
    best_layout = min(layouts, key=lambda name: layouts[name])
    if math.isinf(layouts[best_layout]):
        raise Unsupported(_none_runs(op, columns, gpu))
    decisions = []
    first = 1
    for column in columns:
        decisions.append(_decision(op, layer, column, best_layout))
        decisions[-1] = _with_paths(decisions[-1], first, gpu, freedom)
        first = decisions[-1].tokens + 1
    return decisions


def decide(
    op: str, layer: str, spec: Any, gpu: Gpu, preference: Preference, freedom: Freedom | None = None
) -> Decision:
    """The decision for one spec."""
    return decide_layer(op, layer, [spec], gpu, preference, freedom)[0]


def _offer(
    entry: Implementation[Any], layer: str, spec: Any, first: int, gpu: Gpu, freedom: Freedom
) -> _Offer | Reason:
    """For ``first`` to ``spec.tokens`` tokens."""
    offers, reasons = [], []
    for place, choice in enumerate(freedom.activations or (None,)):
        asked = spec if choice is None else replace(spec, activations=choice)
        reason = entry.supports(asked, gpu)
        reason = reason or paths.compiled_wrong(entry, layer, asked, gpu, min(first, asked.tokens))
        if reason is None:
            offers.append(_Offer(entry, asked, estimate(entry, asked, gpu, freedom.kv_size), place))
        else:
            # That it wants the other activations says nothing when the other ones were tried too.
            reasons.append((choice is not None and reason.endswith(f"not {choice}"), place, reason))
    return min(offers, key=lambda offer: offer.rank) if offers else min(reasons)[-1]


def _as_preferred(op: str, columns: Sequence[_Column], gpu: Gpu, preference: Preference) -> list[_Column]:
    """The columns with all but the wanted implementation out; a preference that cannot be met is an error."""
    wanted = preference.for_op(op)
    if wanted is None:
        return list(columns)
    for column in columns:
        offered = column[wanted]
        if isinstance(offered, str):
            best = _fastest(columns)
            works = f"{preference.option(op)} {best} works" if best else _none_runs(op, columns, gpu).rstrip(".")
            raise Unsupported(f"{preference.option(op)} {wanted} cannot run {op} on {gpu.name}: it {offered}; {works}.")
    return [{n: o if n == wanted else f"{wanted} was asked for" for n, o in column.items()} for column in columns]


def _fastest(columns: Sequence[_Column]) -> str | None:
    """The implementation that runs every size, and all of them fastest."""
    times = {}
    for name in columns[0]:
        offers = [offered for column in columns if isinstance(offered := column[name], _Offer)]
        if len(offers) == len(columns):
            times[name] = math.fsum(math.log(max(offer.rank, 1e-9)) for offer in offers)
    return min(times, key=lambda name: times[name], default=None)


def _what_fits(columns: Sequence[_Column], gpu: Gpu, freedom: Freedom) -> list[_Column]:
    """The columns without those whose weights are more than the card's memory, unless none is left: then what is
    missing is memory and not an implementation, and the sum over all layers says so better."""
    kept: list[_Column] = []
    for column in columns:
        fitting: dict[str, _Offer | Reason] = {}
        for name, offered in column.items():
            reason = None if isinstance(offered, str) else _too_large(offered, gpu, freedom.copies)
            fitting[name] = reason or offered
        kept.append(fitting if any(isinstance(o, _Offer) for o in fitting.values()) else column)
    return kept


def _too_large(offer: _Offer, gpu: Gpu, copies: int) -> Reason | None:
    weights = copies * offer.entry.packed_bytes(offer.spec)
    if weights <= gpu.memory_bytes:
        return None
    has = gpu.memory_bytes / GIB
    return f"takes {weights / GIB:.0f} GiB for the weights of {copies} layers, {gpu.name} has {has:.0f}"


def _as_narrow(column: _Column) -> _Column:
    """The column without those that hold the weights wider than their format, where another holds them as they are at
    about the same speed: the format was chosen for the bytes of every token, and of the memory."""
    offers = [offered for offered in column.values() if isinstance(offered, _Offer)]
    held = {offer.entry.name: offer.entry.packed_bytes(offer.spec) for offer in offers}

    def narrower(offer: _Offer) -> _Offer | None:
        others = (o for o in offers if 1.5 * held[o.entry.name] < held[offer.entry.name])
        return min((o for o in others if o.rank < WIDE * offer.rank), key=lambda o: o.rank, default=None)

    kept: dict[str, _Offer | Reason] = {}
    for name, offered in column.items():
        other = narrower(offered) if isinstance(offered, _Offer) else None
        if other is not None:
            times = held[name] / held[other.entry.name]
            kept[name] = f"holds the weights in {times:.1f} times the bytes of {other.entry.name}"
        else:
            kept[name] = offered
    return kept


def _doubted(column: _Column) -> _Column:
    """The column with those doubted whose speed is stated, if another's was measured."""
    if not any(isinstance(offered, _Offer) and offered.estimate.tuned for offered in column.values()):
        return column
    return {n: o if isinstance(o, str) else replace(o, doubtful=not o.estimate.tuned) for n, o in column.items()}


def _log_time(column: _Column, layout: str) -> float:
    """How slow a layout is at one batch size, by its best implementation. Sizes count alike, so the sum over them is of
    logarithms; infinity where none of the layout's implementations can run the size."""
    ranks = [o.rank for o in column.values() if isinstance(o, _Offer) and o.entry.layout == layout]
    return math.log(max(min(ranks), 1e-9)) if ranks else math.inf


def _decision(op: str, layer: str, column: _Column, layout: str) -> Decision:
    offers = [offered for offered in column.values() if isinstance(offered, _Offer)]
    best = min((o for o in offers if o.entry.layout == layout), key=lambda o: (o.rank, o.exactness))
    losers = [_lost(o, best) for o in offers if o is not best]
    rejected = [Rejected(name, reason) for name, reason in column.items() if isinstance(reason, str)]
    us, tuned = best.estimate.us, best.estimate.tuned
    return Decision(op, layer, best.spec.tokens, best.entry.name, (*losers, *rejected), us, tuned, best.spec)


def _with_paths(decision: Decision, first: int, gpu: Gpu, freedom: Freedom) -> Decision:
    """The decision with the paths of its batch sizes, from ``first`` on."""
    entry = registry.find(decision.op, decision.chosen)
    spec, last = replace(decision.spec, tokens=1), decision.tokens
    kv_fp8 = freedom.kv_size == 1
    found = partial(paths.spans, entry, decision.layer, spec, gpu, min(first, last), last, kv_fp8)
    return replace(decision, find_paths=found)


def _lost(offer: _Offer, best: _Offer) -> Rejected:
    time, least = offer.estimate.us, best.estimate.us
    if offer.exactness > best.exactness and least <= time * WORTH and time <= least:
        reason = f"no faster with {offer.spec.activations} activations: {_us(time)} µs against {_us(least)}"
    elif time >= least:
        reason = f"slower: {_us(time)} µs against {_us(least)}"
    elif offer.doubtful and offer.rank >= best.rank:
        reason = f"stated {_us(time)} µs is too near the measured {_us(least)} µs"
    else:
        reason = f"reads the layout {offer.entry.layout!r}, and {best.entry.layout!r} is faster over all batch sizes"
    return Rejected(offer.entry.name, reason)


def _us(time: float) -> str:
    return f"{time:.0f}" if time >= 99.5 else f"{time:.3g}"


def _none_runs(op: str, columns: Sequence[_Column], gpu: Gpu) -> str:
    """Why no implementation runs: the reasons at the first batch size where that is so."""
    empty = (column for column in columns if not any(isinstance(o, _Offer) for o in column.values()))
    column = next(empty, columns[-1])
    reasons = [f"{name} {reason}" for name, reason in column.items() if isinstance(reason, str)]
    return f"No implementation of {op} runs this on {gpu.name}: {'; '.join(reasons)}."
