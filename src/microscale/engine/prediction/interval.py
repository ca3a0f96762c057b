"""From a sum of kernels to a prediction with an interval, and from what it is known.

The sum is mended by whole models that were measured (``hardware/whole_models.py``). The interval holds the true figure
nine times in ten. On the measured card it comes from how far rows lie from what their neighbours say. On another card
it adds how far each part of the time may be off there: the bandwidth by the range that others measured, fixed times and
arithmetic by the shares below, which are assumptions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from microscale.backends.forecast import Forecast
from microscale.hardware import Gpu, card_name, whole_models
from microscale.hardware.known_times import Basis
from microscale.hardware.reach import reach
from microscale.hardware.whole_models import Case, Mend

NINE_IN_TEN = 1.645
"""Standard deviations to each side that hold nine of ten."""
FIXED_ELSEWHERE = 0.20
"""Log deviation of launches and ramps on another card: clocks and latencies differ by a quarter."""
ARITHMETIC_ELSEWHERE = 0.15
"""Log deviation of instructions and matrix units on another card: data-sheet rates are right within a tenth."""
MACHINES = 0.02
"""Log deviation between machines of one kind."""


@dataclass(frozen=True)
class Interval:
    """A time in microseconds with the range that holds it nine times in ten."""

    us: float
    low_us: float
    high_us: float
    basis: Basis


def interval(parts: Forecast, case: Case, gpu: Gpu) -> Interval:
    """The time of one step or prompt whose kernels take ``parts``."""
    rows = None if gpu.is_cpu else whole_models.known(gpu.family)
    here = rows is not None and card_name(gpu) == rows.gpu
    mend = Mend(1.0, 0.0, False, False) if rows is None else whole_models.mend(rows.rows, case, here)
    us = mend.mended(parts.us, parts.memory_us)
    deviation = math.hypot(parts.doubt_us / parts.us, mend.deviation_of(parts.us, parts.memory_us), MACHINES)
    if not here:
        fixed, memory = parts.fixed_us / parts.us, parts.memory_us / parts.us
        deviation = math.hypot(
            deviation,
            memory * reach(gpu).doubt / NINE_IN_TEN,
            fixed * FIXED_ELSEWHERE,
            (1 - fixed - memory) * ARITHMETIC_ELSEWHERE,
        )
    elif mend.near:
        # Rows of this very model stand for what its kernels' rows leave open.
        deviation = math.hypot(mend.deviation, MACHINES)
    factor = math.exp(NINE_IN_TEN * deviation)
    basis = Basis.MEASURED if here and mend.near else Basis.FITTED if parts.basis is Basis.MEASURED else parts.basis
    return Interval(us, us / factor, us * factor, basis)
