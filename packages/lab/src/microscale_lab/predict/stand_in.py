"""Stand-ins: another card's kernels on a part of this GPU, as a test of predictions on rows that the fit has not seen.

``bench sweep --as gb10 --sms 48`` measures them; ``bench fit --against FILE`` predicts the same rows from the whole
card's fit: the stand-in's kernels and SMs, with the clocks of the GPU that ran them and the bandwidth that reading was
measured to reach there: a plain read, and on a part of the SMs the lm_head too.
"""

from __future__ import annotations

import json
from pathlib import Path

from microscale.errors import BadSetting
from microscale.hardware import KNOWN, Gpu
from microscale_lab.predict.fit import HeldOutRow, kernels, score
from microscale_lab.predict.interval import interval
from microscale_lab.predict.rates import stand_in
from microscale_lab.predict.sweep import SweepRow, read


def held(row: SweepRow, played: Gpu, gpu: Gpu) -> HeldOutRow:
    """A row and its prediction; ``played`` decides which kernels run, ``gpu`` how long they take."""
    case = row.case
    time = interval(kernels(case, gpu, played), case, gpu)
    name = f"{case.model} {case.precision} {case.kind} {case.batch} x {case.context}"
    return HeldOutRow(name, row.us, time.us, time.low_us, time.high_us)


def report(file: Path) -> list[str]:
    """Every row of a sweep beside its prediction, and the score."""
    try:
        head = json.loads(file.read_text())
        base, card = head["gpu"], head["card"]
        rates = (head["sms"], head["read_gbs"], head["streamed_gbs"])
        rows = read(file)
    except (OSError, ValueError, KeyError) as error:
        raise BadSetting(f"{file} holds no sweep ({type(error).__name__}: {error}).") from None
    if base not in KNOWN or not rows:
        raise BadSetting(f"{file} has no rows of a known card.")
    gpu = stand_in(base, card, *rates)
    found = [held(row, KNOWN[card or base], gpu) for row in rows]
    lines = [f"{card or base} on {gpu.num_sms} SMs of {base}: {'us':>28} {'predicted':>9} {'error':>7}  90 % interval"]
    for entry in found:
        said = f"{entry.us:>9.0f} {entry.predicted_us:>9.0f} {entry.error:>+7.1%}"
        mark = "" if entry.inside else "  outside"
        lines.append(f"{entry.name:<46} {said}  {entry.low_us:.0f} to {entry.high_us:.0f}{mark}")
    return [*lines, "", score(found).line("rows that the fit has not seen")]
