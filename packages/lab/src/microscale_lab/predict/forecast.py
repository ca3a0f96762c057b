"""How long an implementation will take, and how far that may be off: what the table of predictions is made of.

Where the implementation was measured, on this kind of card or on another, the two-part model of ``kernel_fit`` is
used, elsewhere its stated efficiency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from microscale.engine.predictions import Basis
from microscale.hardware import LAUNCH_US, Feature, Gpu, speeds
from microscale.kernels.op import Cost, Implementation
from microscale.planning.estimate import Estimate, cost_of
from microscale.planning.plan import Setup
from microscale_lab.predict import known_times
from microscale_lab.predict.kernel_fit import Timing
from microscale_lab.predict.measured_as import Call, calls
from microscale_lab.predict.rates import reach_of

GAP_US = 1.0
"""What a launch adds on a card whose kernels cannot start before the one ahead has ended. An assumption."""
STATED_DOUBT = 0.25
"""Log deviation of a time that rests on a stated efficiency."""


@dataclass(frozen=True)
class Forecast(Estimate):
    """The time of one call or of many, with what it is based on. ``launch_us`` includes ramps and tails."""

    memory_us: float = 0.0
    """Of ``us``: reading and writing."""
    doubt_us: float = 0.0
    """One standard deviation of the fit."""
    measured_us: float = 0.0
    """Of ``us``: what was measured on this kind of card."""
    fitted_us: float = 0.0
    """Of ``us``: what was fitted to rows of another card or of other sizes."""

    def __add__(self, other: Self) -> Self:
        both = super().__add__(other)
        return replace(
            both,
            memory_us=self.memory_us + other.memory_us,
            doubt_us=math.hypot(self.doubt_us, other.doubt_us),
            measured_us=self.measured_us + other.measured_us,
            fitted_us=self.fitted_us + other.fitted_us,
        )

    def times(self, count: int) -> Self:
        """The same call ``count`` times: what is wrong with one is wrong with all."""
        names = ("memory_us", "doubt_us", "measured_us", "fitted_us")
        return replace(super().times(count), **{name: getattr(self, name) * count for name in names})

    def without_launches(self) -> Self:
        return replace(self, us=self.us - self.launch_us, launch_us=0.0)

    @property
    def basis(self) -> Basis:
        """From what most of the time is known."""
        if self.measured_us >= 0.9 * self.us:
            return Basis.MEASURED
        return Basis.FITTED if self.measured_us + self.fitted_us >= 0.5 * self.us else Basis.ESTIMATE


def forecast(entry: Implementation[Any], spec: Any, setup: Setup, layer: str) -> Forecast:
    """What ``entry`` will take for ``spec``, as the layer of this name."""
    gpu, kv_size = setup.gpu, setup.kv_size
    cost = cost_of(entry, spec, gpu, kv_size)
    work = (cost.bytes, cost.flops, cost.unit.value, gpu)
    floor, ideal = speeds.floor_us(*work), speeds.ideal_us(*work)
    timings = [] if gpu.is_cpu else [_timing(call, gpu) for call in calls(entry, layer, spec, cost, gpu, kv_size)]
    known = [found for found in timings if found is not None]
    if known and len(known) == len(timings):
        return _fitted(known, floor, cost)
    fixed = 0.0 if gpu.is_cpu else cost.launches * LAUNCH_US
    us = ideal / cost.efficiency + fixed
    memory = min(us - fixed, cost.bytes / (reach_of(gpu).gbs * 1e3))
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
