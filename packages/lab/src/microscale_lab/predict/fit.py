"""``microscale bench fit``: the two-part model on the measured rows, its residuals, and what it says of rows left out.

Every kernel row is predicted from the other rows of its group, every whole model from the other whole models.
``inside`` counts how many lie in the interval that should hold nine of ten. Needs no GPU.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from microscale.engine.predictions import Phase
from microscale.engine.step_times import StepTimes, total
from microscale.hardware import KNOWN, Family, Gpu
from microscale.models.families import PRESETS
from microscale.models.outline import outline
from microscale.planning.ops import Activations
from microscale.planning.plan import Setup, make_plan
from microscale.planning.precision import PRECISIONS
from microscale_lab.predict import known_times, whole_models
from microscale_lab.predict.forecast import Forecast, forecast
from microscale_lab.predict.interval import MACHINES, NINE_IN_TEN
from microscale_lab.predict.kernel_fit import KernelFit, Key, LeftOut, leave_one_out, make_groups
from microscale_lab.predict.whole_models import ModelCase, ModelFile, ModelRow

PAGE_SIZE, STEP_TOKENS = 16, 8192


@dataclass(frozen=True)
class HeldOutRow:
    """One row and what was predicted of it without it."""

    name: str
    us: float
    predicted_us: float
    low_us: float
    high_us: float

    @property
    def error(self) -> float:
        return self.predicted_us / self.us - 1

    @property
    def inside(self) -> bool:
        return self.low_us <= self.us <= self.high_us

    @property
    def width(self) -> float:
        """Of the interval, as a fraction of the prediction."""
        return (self.high_us - self.low_us) / self.predicted_us


@dataclass(frozen=True)
class Score:
    """How well rows were predicted that the fit had not seen."""

    rows: int
    median_error: float
    within_12: float
    inside: float
    median_width: float

    def line(self, name: str) -> str:
        errors = f"median error {self.median_error:.1%}, within 12 %: {self.within_12:.0%}"
        inside = f"inside the 90 % interval: {self.inside:.0%}, its median width {self.median_width:.0%}"
        return f"{name}: {self.rows} rows, {errors}, {inside}"


def score(held: Sequence[HeldOutRow]) -> Score:
    errors = [abs(row.error) for row in held]
    return Score(
        len(held),
        statistics.median(errors),
        sum(error <= 0.12 for error in errors) / len(errors),
        sum(row.inside for row in held) / len(held),
        statistics.median(row.width for row in held),
    )


def groups(family: Family) -> dict[Key, KernelFit]:
    return make_groups(known_times.measured_rows(family))


def held_kernels(family: Family) -> list[HeldOutRow]:
    """Every kernel row by the others of its group."""
    return [_held_kernel(entry) for entry in leave_one_out(known_times.measured_rows(family))]


def _held_kernel(entry: LeftOut) -> HeldOutRow:
    factor = math.exp(NINE_IN_TEN * entry.timing.deviation)
    us = entry.timing.us
    return HeldOutRow(" ".join(entry.key), entry.row.us, us, us / factor, us * factor)


def kernels(case: ModelCase, gpu: Gpu, played: Gpu | None = None) -> Forecast:
    """The sum of the kernels' predictions for a whole model's step or prompt. ``played``: the card for which kernels
    are chosen, if it is another one."""
    steps = _steps(case.model, case.precision, case.context, gpu, played or gpu)
    if case.kind is Phase.DECODE:
        return total(steps.decode(case.batch, case.context))
    return steps.prompt(case.context, STEP_TOKENS)


@lru_cache(maxsize=64)
def _steps(model: str, precision: str, context: int, gpu: Gpu, played: Gpu) -> StepTimes[Forecast]:
    config = PRESETS[model]
    as_published = replace(PRECISIONS[precision], weights_only=config.weights_only)
    setup = Setup(gpu, Activations.BF16, precision=as_published)
    shape = outline(model, config, setup.activations, PAGE_SIZE, context)
    return StepTimes(shape, make_plan(model, shape.uses, replace(setup, gpu=played)), setup, forecast)


def recounted(file: ModelFile) -> ModelFile:
    """The file with the sums that the kernels' rows give now."""
    gpu = KNOWN[file.gpu]
    return replace(file, rows=tuple(_recounted(row, gpu) for row in file.rows))


def _recounted(row: ModelRow, gpu: Gpu) -> ModelRow:
    found = kernels(row.case, gpu)
    return replace(row, kernels_us=round(found.us, 1), memory_us=round(found.memory_us, 1))


def held_models(rows: Sequence[ModelRow]) -> list[HeldOutRow]:
    """Every whole-model row by the others."""
    found = []
    for row in rows:
        others = [other for other in rows if other is not row]
        correction = whole_models.correct(others, row.case, here=True)
        us = correction.corrected(row.kernels_us, row.memory_us)
        factor = math.exp(NINE_IN_TEN * math.hypot(correction.deviation, MACHINES))
        name = f"{row.case.model} {row.case.precision} {row.case.kind} {row.case.batch} x {row.case.context}"
        found.append(HeldOutRow(name, row.us, us, us / factor, us * factor))
    return found


def report(family: Family, file: Path) -> list[str]:
    """The fit as text: parameters and residuals of each group, then what rows left out say."""
    lines = [f"{'group':<62} {'rows':>4} {'fixed us':>8} {'k':>8} {'c or e':>8} {'left':>6}"]
    for key, group in groups(family).items():
        fixed, k, last = group.parameters
        left = math.sqrt(float(group.left @ group.left) / len(group.left))
        lines.append(f"{' '.join(key):<62} {len(group.rows):>4} {fixed:>8.2f} {k:>8.3g} {last:>8.3g} {left:>6.1%}")
    lines += ["", score(held_kernels(family)).line("kernels, each left out")]
    if file.exists():
        held = held_models(recounted(whole_models.read(file)).rows)
        lines += ["", f"{'whole model, left out':<46} {'us':>9} {'predicted':>9} {'error':>7}  90 % interval"]
        for row in held:
            mark = "" if row.inside else "  outside"
            said = f"{row.us:>9.0f} {row.predicted_us:>9.0f} {row.error:>+7.1%}"
            lines.append(f"{row.name:<46} {said}  {row.low_us:.0f} to {row.high_us:.0f}{mark}")
        lines += ["", score(held).line("whole models, each left out")]
    return lines
