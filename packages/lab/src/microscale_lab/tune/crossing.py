"""From which size on another way pays: both are timed at sizes around that place, and the crossing is taken.

Noise: the two ways take turns, and the median of the turns counts. A difference below ``TIE`` is none. Of all places
for the border the one that loses the least time, added up over all sizes and cases, is taken, so that one size at which
the clock went astray does not move it. Where several lose the same, the way for the smaller sizes keeps the more of
them. The border is at a size that was measured, not in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, log
from statistics import median
from typing import NamedTuple

from microscale.errors import MicroscaleError
from microscale_lab.tune.job import Bench, TuningProblem, is_right

TIE = 0.02
"""Relative. One H200 gave the same graph times that differ by 1 % within a minute."""
TURNS = 3


class Sides(NamedTuple):
    """The same work in two ways."""

    below: TuningProblem
    """The way for smaller sizes."""
    above: TuningProblem


@dataclass(frozen=True)
class Crossing:
    """Sizes at which two ways are timed."""

    about: str
    unit: str
    """What a size counts."""
    below: str
    above: str
    sizes: Sequence[int]
    prepare: Callable[[str, int], Sequence[Sides]]
    """The cases of a size, with tensors on this device."""

    def quick(self) -> Crossing:
        """The smallest size and the largest."""
        return replace(self, sizes=(self.sizes[0], self.sizes[-1]) if len(self.sizes) > 1 else self.sizes)


Times = Sequence[tuple[float, float]]
"""Microseconds below and above, of every case."""


@dataclass(frozen=True)
class Border:
    last_below: int | None
    """The largest size of the way for smaller ones; ``None`` where it serves none."""
    first_above: int | None
    text: str
    """What was measured there."""


def find_border(crossing: Crossing, bench: Bench) -> Border:
    """Compile all, then measure size by size: only one size's tensors are held at a time."""
    for size in crossing.sizes:
        bench.compile_ahead(side for sides in crossing.prepare(bench.device, size) for side in sides)
    times = []
    for size in crossing.sizes:
        times.append([_take_turns(sides, bench) for sides in crossing.prepare(bench.device, size)])
        bench.advance()
    place = border(times)
    if place is None:
        raise MicroscaleError(
            f"Neither {crossing.below} nor {crossing.above} is right on {bench.gpu.name}: {crossing.about}."
        )
    around = range(max(0, place - 1), min(len(times), place + 1))
    said = (_said(crossing, crossing.sizes[index], times[index]) for index in around)
    return Border(
        crossing.sizes[place - 1] if place else None,
        crossing.sizes[place] if place < len(times) else None,
        f"{crossing.about}: {'; '.join(said)}",
    )


def border(times: Sequence[Times]) -> int | None:
    """How many sizes, from the smallest on, the way below serves; ``None`` where every border has wrong answers."""
    below = [sum(_lost(ours, other) for ours, other in of_size) for of_size in times]
    above = [sum(_lost(ours, other) for other, ours in of_size) for of_size in times]
    lost = [sum(below[:place]) + sum(above[place:]) for place in range(len(times) + 1)]
    least = min(lost)
    return None if least == inf else max(place for place, value in enumerate(lost) if value <= least + 1e-9)


def _lost(ours: float, other: float) -> float:
    """By how much, as a logarithm, the other way is faster; nothing within the noise."""
    if ours == inf:
        return inf
    lost = 0.0 if other == inf else log(ours / other)
    return lost if lost > log(1 + TIE) else 0.0


def _take_turns(sides: Sides, bench: Bench) -> tuple[float, float]:
    right = [is_right(side) for side in sides]
    turns = [
        [bench.time_us(side.work) / side.calls if good else inf for side, good in zip(sides, right, strict=True)]
        for _ in range(1 if bench.quick else TURNS)
    ]
    below, above = (median(turn[index] for turn in turns) for index in range(2))
    return below, above


def _said(crossing: Crossing, size: int, times: Times) -> str:
    below, above = (" and ".join(f"{pair[side]:.1f}" for pair in times) for side in range(2))
    return f"at {size} {crossing.unit} {crossing.below} {below} us, {crossing.above} {above}"
