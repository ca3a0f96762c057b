"""How near to a card's ceilings each implementation came where it was measured.

``measured/<family>.json`` holds rows of benchmarks: the work (bytes and operations, as the implementation's ``cost``
counts them), the path that ran it, its launches, and the microseconds that it took in a CUDA graph, launches included.
A row's efficiency is the ideal time by the table's rates (``ideal_us``) over that. ``efficiency`` answers for other
work of the same implementation from the nearest rows, and gives ``None`` where nothing near enough was measured: then
the implementation's stated figure holds. The oracle ranks by it. What ``explain`` predicts comes from ``known_times``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from microscale.errors import BadSetting
from microscale.hardware.families import KNOWN, Family, Gpu
from microscale.hardware.fit import peak_tflops
from microscale.hardware.stand_in import stand_in

MEASURED_DIR = Path(__file__).parent / "measured"
PLAYED = "played"
"""The folder in it of rows that ran on another card (``bench kernels --as CARD --record``). They are that card's
kernels at the other's rates: predictions use them, and the oracle does not."""
NEAR = 2.0
"""Rows further away than this many doublings of bytes or operations say nothing about a piece of work."""
TOO_FAST = 1.5
"""Rates of the table are right within a tenth; what is half as fast again was measured wrongly."""
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
    """Whose peak the operations are held against: ``bf16``, ``fp8`` or ``fp4``."""
    path: str
    """Which of the implementation's paths ran it; for small ops the op."""
    launches: int
    """Kernels of ours that one call started."""
    programs: int
    """Programs of the largest of them; 0 where it was not counted."""
    us: float

    def efficiency(self, card: Gpu) -> float:
        return ideal_us(self.bytes, self.flops, self.unit, card) / self.us


@dataclass(frozen=True)
class SpeedFile:
    """What was measured on one card; it serves the card's whole family."""

    family: str
    gpu: str
    """The card's name on the command line: its rates in the table turn times into efficiencies."""
    torch: str
    triton: str
    date: str
    rows: tuple[Measured, ...]
    runs_on: str | None = None
    """The card that ran the kernels, where it was not ``gpu`` itself (``--as``)."""

    @property
    def rates(self) -> Gpu:
        """The rates that its rows were measured with."""
        return KNOWN[self.gpu] if self.runs_on is None else stand_in(self.runs_on, self.gpu)

    def to_json(self) -> str:
        names = HEAD if self.runs_on is None else (*HEAD, "runs_on")
        head = [f" {json.dumps(name)}: {json.dumps(getattr(self, name))}," for name in names]
        rows = ",\n".join(f"  {json.dumps(asdict(row))}" for row in self.rows)
        return "\n".join(["{", *head, ' "rows": [', rows, " ]", "}"]) + "\n"


def _ends_us(num_bytes: float, flops: float, unit: str, gpu: Gpu) -> tuple[float, float]:
    """Reading alone, at full bandwidth, and computing alone, at the unit's peak."""
    return num_bytes / (gpu.bandwidth_gbs * 1e3), flops / (peak_tflops(unit, gpu) * 1e6)


def floor_us(num_bytes: float, flops: float, unit: str, gpu: Gpu) -> float:
    """The time that no kernel can beat on this card."""
    return max(_ends_us(num_bytes, flops, unit, gpu))


def ideal_us(num_bytes: float, flops: float, unit: str, gpu: Gpu) -> float:
    """What efficiencies are fractions of: the floor where reading or computing is all of the work, more where both
    weigh. They overlap, but not fully: 1024 tokens through gpt-oss-120b's experts take 780 us on an H200, where reading
    alone takes 394 and computing alone 258, while 64 tokens take 382 against 335 and 16."""
    return math.hypot(*_ends_us(num_bytes, flops, unit, gpu))


def efficiency(family: Family, op: str, implementation: str, num_bytes: float, flops: float) -> float | None:
    """The fraction of the floor's speed to expect of this work, from the nearest measured rows of the family.

    Rows count by the inverse square of their distance in doublings, so a row for exactly this work decides alone.
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
    # The mean of times, not of speeds: an efficiency stands below a floor.
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
    """A file of measured speeds, checked: every key there, none unknown, no time far below its floor."""
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BadSetting(f"{file} cannot be read as JSON ({error}); measure again or remove it.") from None
    played = isinstance(data, dict) and "runs_on" in data
    _keys(file, data, {*HEAD, "rows", *(["runs_on"] if played else [])})
    if data["family"] != family.name:
        raise BadSetting(f"{file} was measured for family {data['family']!r}, not {family.name!r}.")
    if data["gpu"] not in KNOWN or KNOWN[data["gpu"]].family is not family:
        raise BadSetting(f"{file} was measured on {data['gpu']!r}, which is no known card of family {family.name!r}.")
    if played and data["runs_on"] not in KNOWN:
        raise BadSetting(f"{file} ran on {data['runs_on']!r}, which is no known card.")
    head = SpeedFile(**{name: value for name, value in data.items() if name != "rows"}, rows=())
    return replace(head, rows=tuple(_row(file, row, head) for row in data["rows"]))


def _row(file: Path, data: Any, head: SpeedFile) -> Measured:
    _keys(file, data, {field.name for field in fields(Measured)})
    row = Measured(**data)
    if row.unit not in ("bf16", "fp8", "fp4") or not row.us > 0 or row.bytes + row.flops <= 0:
        raise BadSetting(f"{file}: the row {row.case!r} of {row.implementation} is no measured work.")
    if row.efficiency(head.rates) > TOO_FAST:
        card = head.runs_on or head.gpu
        raise BadSetting(f"{file}: the row {row.case!r} of {row.implementation} is faster than {card} can be.")
    return row


def _keys(file: Path, data: Any, expected: set[str]) -> None:
    if not isinstance(data, dict) or set(data) != expected:
        found = sorted(data) if isinstance(data, dict) else data
        raise BadSetting(f"{file} must have the keys {', '.join(sorted(expected))}, not {found}.")


def merge(old: SpeedFile | None, new: SpeedFile) -> SpeedFile:
    """``new`` with those rows of ``old`` whose case it did not measure again."""
    fresh = {(row.op, row.implementation, row.case) for row in new.rows}
    kept: Iterable[Measured] = () if old is None else old.rows
    rows = (*(row for row in kept if (row.op, row.implementation, row.case) not in fresh), *new.rows)
    ordered = sorted(rows, key=lambda row: (row.op, row.implementation, row.flops, row.bytes))
    return replace(new, rows=tuple(ordered))
