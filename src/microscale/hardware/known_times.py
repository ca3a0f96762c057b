"""What the measured rows say about other work and other cards, by the two-part model of ``fit``.

``find`` gives a time for work of kernels that were measured, on the measured card and on others, and ``None`` where
nothing of the implementation was measured: then its stated efficiency holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from microscale.hardware import speeds, whole_models
from microscale.hardware.families import FAMILY_OF_SM, KNOWN, Family, Gpu
from microscale.hardware.fit import Group, Key, Row, Timing, Work, make_groups, place
from microscale.hardware.gpu import card_name


class Basis(StrEnum):
    """From what a time is known."""

    MEASURED = "measured"
    """On this kind of card, for work of about this size."""
    FITTED = "fitted"
    """The same kernels were measured on another card, or at other sizes."""
    STATED = "data sheet"
    """The card's rates, and an efficiency that the implementation states."""


OTHER_PATH = 0.2
"""Log deviation that is added where another path of the implementation stands for the one that runs."""


@dataclass(frozen=True)
class Source:
    """The groups that one card was measured for."""

    card: str
    groups: Mapping[Key, Group]


def find(gpu: Gpu, op: str, implementation: str, path: str, work: Work) -> tuple[Timing, Basis] | None:
    """The time of this work, from rows of the card's own family if there are any, else from those of another."""
    own = _source(gpu.family)
    for source in (own, *(_source(family) for family in _measured_families() if family is not gpu.family)):
        found = None if source is None else _group(source, op, implementation, path, work)
        if source is None or found is None:
            continue
        group, exact = found
        here = source is own and card_name(gpu) == source.card
        timing = group.here(work, gpu) if here else group.elsewhere(work, gpu)
        if not exact:
            timing = timing.scaled(1.0, math.hypot(timing.deviation, OTHER_PATH))
        near = source is own and min(_distance(work, row.work) for row in group.rows) <= speeds.NEAR
        return timing, Basis.MEASURED if near else Basis.FITTED
    return None


def _group(source: Source, op: str, implementation: str, path: str, work: Work) -> tuple[Group, bool] | None:
    """The path's own group, or that of the implementation's path with the rows nearest to this work."""
    exact = source.groups.get((op, implementation, path))
    if exact is not None:
        return exact, True
    others = [group for key, group in source.groups.items() if key[:2] == (op, implementation)]
    if not others:
        return None
    return min(others, key=lambda group: min(_distance(work, row.work) for row in group.rows)), False


def _distance(a: Work, b: Work) -> float:
    return max(abs(x - y) for x, y in zip(place(a), place(b), strict=True))


@cache
def _measured_families() -> tuple[Family, ...]:
    named = {family.name: family for family in FAMILY_OF_SM.values()}
    return tuple(named[file.stem] for file in sorted(speeds.MEASURED_DIR.glob("*.json")) if file.stem in named)


def measured_rows(family: Family) -> dict[Key, list[Row]]:
    """The rows of a family by op, implementation and path."""
    file = speeds.read(speeds.MEASURED_DIR / f"{family.name}.json", family)
    found: dict[Key, list[Row]] = {}
    for row in file.rows:
        entry = Row(Work(row.bytes, row.flops, row.unit), row.us, KNOWN[file.gpu])
        found.setdefault((row.op, row.implementation, row.path), []).append(entry)
    return found


@cache
def _source(family: Family) -> Source | None:
    file = speeds.MEASURED_DIR / f"{family.name}.json"
    return Source(speeds.read(file, family).gpu, make_groups(measured_rows(family))) if file.exists() else None


def forget() -> None:
    """Read the files again: they were written or moved."""
    _source.cache_clear()
    _measured_families.cache_clear()
    whole_models.known.cache_clear()
