"""How long an implementation will take, and how far that may be off: what ``explain`` and ``bench`` predict with.

Where the implementation was measured, on this kind of card or on another, the two-part model of ``hardware/fit.py``
answers; elsewhere its stated efficiency. The oracle ranks by ``estimate``, which knows nothing of other cards' rows:
a better prediction must not change what runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from microscale.backends.estimate import cost_of
from microscale.backends.measured_as import Call, calls
from microscale.hardware import LAUNCH_US, Feature, Gpu, known_times, speeds
from microscale.hardware.fit import Timing
from microscale.hardware.known_times import Basis
from microscale.hardware.reach import reach
from microscale.kernels.op import Cost, Implementation

GAP_US = 1.0
"""What a launch adds on a card whose kernels cannot start before the one ahead has ended. An assumption."""
STATED_DOUBT = 0.25
"""Log deviation of a time that rests on a stated efficiency."""


@dataclass(frozen=True)
class Forecast:
    """The time of one call or of many, and what stands behind it."""

    us: float
    floor_us: float
    bytes: int
    flops: int
    tuned: bool
    """It rests on a measurement on this kind of card, for work of about this size."""
    fixed_us: float = 0.0
    """Of ``us``: launches, ramps and tails."""
    memory_us: float = 0.0
    """Of ``us``: reading and writing."""
    doubt_us: float = 0.0
    """One standard deviation of the fit."""
    measured_us: float = 0.0
    """Of ``us``: what was measured on this kind of card."""
    fitted_us: float = 0.0
    """Of ``us``: what was fitted to rows of another card or of other sizes."""

    def __add__(self, other: Forecast) -> Forecast:
        return Forecast(
            self.us + other.us,
            self.floor_us + other.floor_us,
            self.bytes + other.bytes,
            self.flops + other.flops,
            self.tuned and other.tuned,
            self.fixed_us + other.fixed_us,
            self.memory_us + other.memory_us,
            math.hypot(self.doubt_us, other.doubt_us),
            self.measured_us + other.measured_us,
            self.fitted_us + other.fitted_us,
        )

    def times(self, count: int) -> Forecast:
        """The same call so often: what is wrong with one is wrong with all."""
        parts = (self.fixed_us, self.memory_us, self.doubt_us, self.measured_us, self.fitted_us)
        sizes = (self.us * count, self.floor_us * count, self.bytes * count, self.flops * count)
        return Forecast(*sizes, self.tuned, *(part * count for part in parts))

    @property
    def basis(self) -> Basis:
        """From what most of the time is known."""
        if self.measured_us >= 0.9 * self.us:
            return Basis.MEASURED
        return Basis.FITTED if self.measured_us + self.fitted_us >= 0.5 * self.us else Basis.STATED


NOTHING = Forecast(0.0, 0.0, 0, 0, tuned=True)


def forecast(entry: Implementation[Any], spec: Any, gpu: Gpu, kv_size: int = 2, layer: str = "") -> Forecast:
    """What ``entry`` will take for ``spec`` on ``gpu``; ``kv_size`` is the bytes of one cached number."""
    cost = cost_of(entry, spec, gpu, kv_size)
    work = (cost.bytes, cost.flops, cost.unit.value, gpu)
    floor, ideal = speeds.floor_us(*work), speeds.ideal_us(*work)
    timings = [] if gpu.is_cpu else [_timing(call, gpu) for call in calls(entry, layer, spec, cost, gpu, kv_size)]
    known = [found for found in timings if found is not None]
    if known and len(known) == len(timings):
        return _fitted(known, floor, cost)
    fixed = 0.0 if gpu.is_cpu else cost.launches * LAUNCH_US
    us = ideal / cost.efficiency + fixed
    memory = min(us - fixed, cost.bytes / (reach(gpu).gbs * 1e3))
    return Forecast(us, floor, cost.bytes, cost.flops, False, fixed, memory, STATED_DOUBT * us)


def _timing(call: Call, gpu: Gpu) -> tuple[Timing, Basis] | None:
    found = known_times.find(gpu, call.op, call.implementation, call.path, call.work)
    if found is None or gpu.has(Feature.PDL) or found[1] is Basis.MEASURED:
        return found
    timing, basis = found
    return replace(timing, fixed=timing.fixed + call.launches * GAP_US), basis


def _fitted(known: Sequence[tuple[Timing, Basis]], floor: float, cost: Cost) -> Forecast:
    us = sum(timing.us for timing, _ in known)
    fixed, memory = sum(timing.fixed for timing, _ in known), sum(timing.memory for timing, _ in known)
    doubt = sum(timing.us * timing.deviation for timing, _ in known)
    measured = sum(timing.us for timing, basis in known if basis is Basis.MEASURED)
    tuned = all(basis is Basis.MEASURED for _, basis in known)
    parts = (fixed, memory, doubt, measured, us - measured)
    return Forecast(us, floor, cost.bytes, cost.flops, tuned, *parts)


def total(estimates: Sequence[Forecast]) -> Forecast:
    """All of them, one after the other."""
    return sum(estimates, NOTHING)
