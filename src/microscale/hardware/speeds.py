"""How close to a card's ceilings each implementation came where it was measured.

``measured/<family>.json`` holds rows of kernel benchmarks: the work (bytes and operations, as the implementation's
``cost`` counts them), the path that ran it, its launches, and the microseconds that it took in a CUDA graph, launches
included. A row's efficiency is its ideal time (``ideal_us``) over the measured time. ``efficiency`` interpolates
between the nearest rows of the same implementation; it is ``None`` where nothing similar was measured, and then the
implementation's stated efficiency is used. ``microscale bench kernels --record`` writes these files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from microscale.errors import BadSetting
from microscale.hardware.cards import KNOWN, Family, Gpu
from microscale.hardware.data_files import read_object, to_record

MEASURED_DIR = Path(__file__).parent / "measured"
NEAR = 2.0
"""Rows that differ by more than this many doublings of bytes or operations are ignored."""
AGAIN = "measure again or remove it"
TOO_FAST = 1.5
"""A row that beats its ideal time by this factor was measured wrongly: the card table's rates are right within 10 %."""
HEAD = ("family", "gpu", "torch", "triton", "date")


@dataclass(frozen=True)
class Measured:
    """One measured case of one implementation."""

    op: str
    implementation: str
    case: str
    bytes: int
    flops: int
    unit: str
    """The matrix unit whose peak bounds the operations: ``bf16``, ``fp8`` or ``fp4``."""
    path: str
    """The implementation's path that ran it; for small ops the op."""
    launches: int
    """Kernels of ours that one call started."""
    programs: int
    """Programs of the largest kernel; 0 where it was not counted."""
    us: float

    def efficiency(self, card: Gpu) -> float:
        return ideal_us(self.bytes, self.flops, self.unit, card) / self.us


@dataclass(frozen=True)
class SpeedFile:
    """What was measured on one card. It is used for the card's whole family."""

    family: str
    gpu: str
    """The card's name on the command line."""
    torch: str
    triton: str
    date: str
    rows: tuple[Measured, ...]


def peak_tflops(unit: str, gpu: Gpu) -> float:
    peaks = {"bf16": gpu.peak.bf16, "fp8": gpu.peak.fp8, "fp4": gpu.peak.fp4}
    return peaks[unit] or gpu.peak.bf16


def _limits_us(num_bytes: float, flops: float, unit: str, gpu: Gpu) -> tuple[float, float]:
    """Reading alone, at full bandwidth, and computing alone, at the unit's peak."""
    return num_bytes / (gpu.bandwidth_gbs * 1e3), flops / (peak_tflops(unit, gpu) * 1e6)


def floor_us(num_bytes: float, flops: float, unit: str, gpu: Gpu) -> float:
    """The time that no kernel can beat on this card."""
    return max(_limits_us(num_bytes, flops, unit, gpu))


def ideal_us(num_bytes: float, flops: float, unit: str, gpu: Gpu) -> float:
    """The time that efficiencies are relative to: the floor where either reading or computing dominates, more where
    both matter. They overlap, but not fully: 1024 tokens through gpt-oss-120b's experts take 780 us on an H200, where
    reading alone takes 394 and computing alone 258, while 64 tokens take 382 against 335 and 16."""
    return math.hypot(*_limits_us(num_bytes, flops, unit, gpu))


def efficiency(family: Family, op: str, implementation: str, num_bytes: float, flops: float) -> float | None:
    """The fraction of the ideal speed to expect, from the nearest measured rows of the family.

    Rows are weighted by the inverse square of their distance in doublings: a row for exactly this work decides alone.
    """
    here = _place(num_bytes, flops)
    near = []
    for place, value in _index(family).get((op, implementation), ()):
        distance = max(abs(a - b) for a, b in zip(here, place, strict=True))
        if distance <= NEAR:
            near.append((1 / max(distance, 1e-3) ** 2, value))
    if not near:
        return None
    total = sum(weight for weight, _ in near)
    # The mean of times, not of speeds.
    return total / sum(weight / value for weight, value in near)


def _place(num_bytes: float, flops: float) -> tuple[float, float]:
    return math.log2(1 + num_bytes), math.log2(1 + flops)


@cache
def _index(family: Family) -> Mapping[tuple[str, str], list[tuple[tuple[float, float], float]]]:
    file = MEASURED_DIR / f"{family.name}.json"
    if not file.exists():
        return {}
    speeds = read(file, family)
    index: dict[tuple[str, str], list[tuple[tuple[float, float], float]]] = {}
    for row in speeds.rows:
        entry = (_place(row.bytes, row.flops), row.efficiency(KNOWN[speeds.gpu]))
        index.setdefault((row.op, row.implementation), []).append(entry)
    return index


def read(file: Path, family: Family) -> SpeedFile:
    """A file of measured speeds. Its times are not far below their floors."""
    data = read_object(file, AGAIN)
    card = KNOWN.get(data.get("gpu", ""))
    if card is None or card.family is not family:
        raise BadSetting(f"{file} was measured on {data.get('gpu')!r}, not on a known card of family {family.name!r}.")
    return parse(file, data, family, card)


def parse(file: Path, data: dict[str, Any], family: Family, rates: Gpu) -> SpeedFile:
    """``rates``: of the card that ran the rows."""
    speeds: SpeedFile = to_record(file, SpeedFile, data, AGAIN)
    if speeds.family != family.name:
        raise BadSetting(f"{file} was measured for family {speeds.family!r}, not {family.name!r}.")
    for row in speeds.rows:
        if row.unit not in ("bf16", "fp8", "fp4") or not row.us > 0 or row.bytes + row.flops <= 0:
            raise BadSetting(f"{file}: the row {row.case!r} of {row.implementation} is not a measurement.")
        if row.efficiency(rates) > TOO_FAST:
            raise BadSetting(
                f"{file}: the row {row.case!r} of {row.implementation} is faster than {rates.name} can be."
            )
    return speeds
