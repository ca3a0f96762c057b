"""From a sum of kernels to a prediction with an interval, and from what it is known.

The sum is corrected by whole models that were measured (``whole_models``). The interval holds the true figure
nine times in ten. On the measured card it comes from how far rows lie from what their neighbours say. On another card
it adds how far each part of the time may be off there: the bandwidth by the range that others measured, fixed times and
arithmetic by the shares below, which are assumptions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from microscale.engine.predictions import Basis
from microscale.hardware import Gpu, card_name
from microscale_lab.predict import whole_models
from microscale_lab.predict.forecast import Forecast
from microscale_lab.predict.rates import reach_of
from microscale_lab.predict.whole_models import Correction, ModelCase

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


def interval(parts: Forecast, case: ModelCase, gpu: Gpu) -> Interval:
    """The time of one step or prompt whose kernels take ``parts``."""
    rows = None if gpu.is_cpu else whole_models.known(gpu.family)
    here = rows is not None and card_name(gpu) == rows.gpu
    correction = Correction(1.0, 0.0, False, False) if rows is None else whole_models.correct(rows.rows, case, here)
    us = correction.corrected(parts.us, parts.memory_us)
    deviation = math.hypot(parts.doubt_us / parts.us, correction.deviation_of(parts.us, parts.memory_us), MACHINES)
    if not here:
        fixed, memory = parts.launch_us / parts.us, parts.memory_us / parts.us
        deviation = math.hypot(
            deviation,
            memory * reach_of(gpu).doubt / NINE_IN_TEN,
            fixed * FIXED_ELSEWHERE,
            (1 - fixed - memory) * ARITHMETIC_ELSEWHERE,
        )
    elif correction.near:
        # Rows of this very model replace the doubt that its kernels' rows leave.
        deviation = math.hypot(correction.deviation, MACHINES)
    factor = math.exp(NINE_IN_TEN * deviation)
    basis = (
        Basis.MEASURED if here and correction.near else Basis.FITTED if parts.basis is Basis.MEASURED else parts.basis
    )
    return Interval(us, us / factor, us * factor, basis)
