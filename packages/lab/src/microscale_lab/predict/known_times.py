"""What the measured rows say about other work and other cards, by the two-part model of ``kernel_fit``.

``find`` gives a time for work of kernels that were measured, on the measured card and on others, and ``None`` where
nothing of the implementation was measured: then its stated efficiency is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from microscale.engine.predictions import Basis
from microscale.hardware import FAMILY_OF_SM, KNOWN, Family, Feature, Gpu, card_name, speeds
from microscale_lab.predict import whole_models
from microscale_lab.predict.kernel_fit import FitRow, KernelFit, KernelWork, Key, Timing, make_groups, place
from microscale_lab.predict.rates import library_rates
from microscale_lab.predict.record import played_files

LIBRARY = "dequantized"
"""The implementation whose products are torch's."""
OTHER_PATH = 0.2
"""Log deviation that is added where another path of the implementation is used for the one that runs."""


@dataclass(frozen=True)
class Source:
    """The groups that one card was measured for."""

    card: str
    groups: Mapping[Key, KernelFit]
    played: bool = False
    """Its kernels ran on another card, and are of use only where the very same path runs."""


def find(gpu: Gpu, op: str, implementation: str, path: str, work: KernelWork) -> tuple[Timing, Basis] | None:
    """The time of this work, from rows of the card's own family if there are any, else from those of another."""
    own = _source(gpu.family)
    others = (_source(family) for family in _measured_families() if family is not gpu.family)
    for source in (own, *_played_sources(gpu), *others):
        found = None if source is None else _group(source, op, implementation, path, work)
        if source is None or found is None:
            continue
        group, exact = found
        here = source is own and card_name(gpu) == source.card
        rates = library_rates(gpu) if implementation == LIBRARY else gpu
        if source.played:  # the same tiles: what the formula leaves of neighbouring rows is theirs here too
            timing = group.here(work, rates).scaled(1.0, group.deviation)
        else:
            timing = group.here(work, gpu) if here else group.elsewhere(work, rates)
        if not exact:
            timing = timing.scaled(1.0, math.hypot(timing.deviation, OTHER_PATH))
        near = source is own and min(_distance(work, row.work) for row in group.rows) <= speeds.NEAR
        return timing, Basis.MEASURED if near else Basis.FITTED
    return None


def _group(source: Source, op: str, implementation: str, path: str, work: KernelWork) -> tuple[KernelFit, bool] | None:
    """The path's own group; else that of the same path without what else tells rows apart (FP8 KV, drafts), or of the
    implementation's path with the rows nearest to this work."""
    exact = source.groups.get((op, implementation, path))
    if exact is not None:
        return exact, True
    if source.played:
        return None
    name = path
    while ", " in name:
        name = name.rpartition(", ")[0]
        if (op, implementation, name) in source.groups:
            return source.groups[op, implementation, name], False
    others = [group for key, group in source.groups.items() if key[:2] == (op, implementation)]
    if not others:
        return None
    return min(others, key=lambda group: min(_distance(work, row.work) for row in group.rows)), False


def _distance(a: KernelWork, b: KernelWork) -> float:
    return max(abs(x - y) for x, y in zip(place(a), place(b), strict=True))


@cache
def _measured_families() -> tuple[Family, ...]:
    named = {family.name: family for family in FAMILY_OF_SM.values()}
    return tuple(named[file.stem] for file in sorted(speeds.MEASURED_DIR.glob("*.json")) if file.stem in named)


def measured_rows(family: Family) -> dict[Key, list[FitRow]]:
    """The rows of a family by op, implementation and path."""
    file = speeds.read(speeds.MEASURED_DIR / f"{family.name}.json", family)
    return _by_path(file, KNOWN[file.gpu])


def _by_path(file: speeds.SpeedFile, rates: Gpu) -> dict[Key, list[FitRow]]:
    found: dict[Key, list[FitRow]] = {}
    for row in file.rows:
        entry = FitRow(KernelWork(row.bytes, row.flops, row.unit), row.us, rates)
        found.setdefault((row.op, row.implementation, row.path), []).append(entry)
    return found


@cache
def _source(family: Family) -> Source | None:
    file = speeds.MEASURED_DIR / f"{family.name}.json"
    return Source(speeds.read(file, family).gpu, make_groups(measured_rows(family))) if file.exists() else None


def _played_sources(gpu: Gpu) -> tuple[Source, ...]:
    """Kernels on mma.sync that ran on a card with more, for cards that run them: those of the family first."""
    if any(gpu.has(feature) for feature in (Feature.WGMMA, Feature.TCGEN05)):
        return ()
    return tuple(sorted(_all_played(), key=lambda source: KNOWN[source.card].family is not gpu.family))


@cache
def _all_played() -> tuple[Source, ...]:
    return tuple(Source(file.gpu, make_groups(_by_path(file, rates)), played=True) for file, rates in played_files())


def forget() -> None:
    """Read the files again: they were written or moved."""
    _source.cache_clear()
    _all_played.cache_clear()
    _measured_families.cache_clear()
    whole_models.known.cache_clear()
