"""Whole models as they were measured, and what that says of sums of kernels.

A step is more than its kernels (embedding, gaps, the host) and less (streams that overlap). ``measured/models/
<family>.json`` holds whole steps and prompts with the sum that the kernels' rows gave for each when the file was
written. Predictions take the sum and correct it by what neighbouring rows left: same kind, same model, same precision,
nearly the same batch and context. On another card only the mean of the kind is known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from microscale.engine.predictions import Phase
from microscale.errors import BadSetting
from microscale.hardware import KNOWN, Family
from microscale_lab.predict.record import DATA

Vector = npt.NDArray[Any]
HEAD = ("family", "gpu", "torch", "triton", "date", "source")
NOISE = 0.02
"""Log deviation of one row measured twice; between machines of one kind it is up to 5 %."""
LEAST_DOUBT = 0.05
"""Log deviation that sums of kernels are given before the rows speak, with the weight of three of them."""
ALIKE = (0.2, 0.45, 0.35)
"""Of what a sum of kernels misses: common to a kind, to a model, and to a model in one precision."""
MOST_OFF = 4.0
"""A row that says that all but reading is faster by more is counted as if it were so much."""
ANOTHER_CARD = 0.7
"""The part of that which another card has in common."""
DOUBLINGS = {"decode": 3.0, "prefill": 1.5}
"""Of batch or context, over which rows are alike: prompts change their kernels with their length."""


@dataclass(frozen=True)
class ModelCase:
    """One step of decoding, or one prompt."""

    model: str
    precision: str
    kind: Phase
    batch: int
    context: int
    """Cached tokens of each sequence in the middle of the run; for a prompt its length."""


@dataclass(frozen=True)
class ModelRow:
    """A case as it was measured."""

    case: ModelCase
    us: float
    """Of one step, or of the whole prompt."""
    kernels_us: float
    """The sum of the kernels' predictions for it, when the file was written."""
    memory_us: float
    """The part of it in which bytes are read."""

    @property
    def left(self) -> float:
        """What the sum misses, as a logarithm."""
        return math.log(self.us / self.kernels_us)

    @property
    def left_of_rest(self) -> float:
        """The same, all of it in what is not reading: bytes take what they take."""
        rest = self.kernels_us - self.memory_us
        return math.log(max(self.us - self.memory_us, rest / MOST_OFF) / rest)

    def to_json(self) -> dict[str, Any]:
        sums = {"kernels_us": self.kernels_us, "memory_us": self.memory_us}
        return {**asdict(self.case), "us": self.us, **sums}


@dataclass(frozen=True)
class ModelFile:
    family: str
    gpu: str
    torch: str
    triton: str
    date: str
    source: str
    rows: tuple[ModelRow, ...]

    def to_json(self) -> str:
        head = [f" {json.dumps(name)}: {json.dumps(getattr(self, name))}," for name in HEAD]
        rows = ",\n".join(f"  {json.dumps(row.to_json())}" for row in self.rows)
        return "\n".join(["{", *head, ' "rows": [', rows, " ]", "}"]) + "\n"


def file_of(family: str, directory: Path | None = None) -> Path:
    return (directory or DATA) / "models" / f"{family}.json"


def read(file: Path) -> ModelFile:
    """A file of whole-model rows, checked."""
    names = {field.name for field in fields(ModelCase)}
    try:
        data = json.loads(file.read_text())
        rows = []
        for row in data["rows"]:
            times = {"us", "kernels_us", "memory_us"}
            if set(row) != names | times or not (row["us"] > 0 and row["kernels_us"] > row["memory_us"] >= 0):
                raise ValueError(f"the row {row} is no measured step")
            case = ModelCase(**{name: row[name] for name in names} | {"kind": Phase(row["kind"])})
            rows.append(ModelRow(case, row["us"], row["kernels_us"], row["memory_us"]))
        head = {name: str(data[name]) for name in HEAD}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadSetting(f"{file} holds no whole-model rows ({error}); measure again or remove it.") from None
    if head["gpu"] not in KNOWN or KNOWN[head["gpu"]].family.name != head["family"]:
        raise BadSetting(f"{file} was measured on {head['gpu']!r}, no known card of family {head['family']!r}.")
    return ModelFile(**head, rows=tuple(rows))


@dataclass(frozen=True)
class Correction:
    """What a sum of kernels is to be multiplied by, and the log deviation of that."""

    factor: float
    deviation: float
    near: bool
    """It rests on rows of the same model in the same precision on this kind of card."""
    of_rest: bool
    """Only what is not reading is multiplied: the rows are another card's, and its bandwidth is known."""

    def corrected(self, us: float, memory_us: float) -> float:
        """A sum of kernels of which so much is reading."""
        return memory_us + (us - memory_us) * self.factor if self.of_rest else us * self.factor

    def deviation_of(self, us: float, memory_us: float) -> float:
        """Of the whole, as a logarithm."""
        whole = self.corrected(us, memory_us)
        return self.deviation * (whole - memory_us) / whole if self.of_rest else self.deviation


@dataclass(frozen=True)
class _Fitted:
    """What rows of one kind have in common."""

    left: Vector
    mean: float
    spread: float
    inverse: Vector
    """The inverse of the rows' covariance."""


@lru_cache(maxsize=16)
def _fitted(alike: tuple[ModelRow, ...], here: bool) -> _Fitted:
    left = np.array([row.left if here else row.left_of_rest for row in alike])
    mean = float(np.sort(left)[len(alike) // 2])
    spread = math.sqrt((float(((left - mean) ** 2).sum()) + 3 * LEAST_DOUBT**2) / (len(alike) + 3))
    likeness = np.array([[_likeness(a.case, b.case) for b in alike] for a in alike])
    return _Fitted(left, mean, spread, np.linalg.inv(spread**2 * likeness + NOISE**2 * np.eye(len(alike))))


def correct(rows: Sequence[ModelRow], case: ModelCase, here: bool) -> Correction:
    """For one case, from the rows of its kind; ``here``: they are of this kind of card. What sums of kernels leave out
    is launches and arithmetic for the most part: it is alike on another card too, but less."""
    alike = tuple(row for row in rows if row.case.kind is case.kind)
    if not alike:
        return Correction(1.0, 3 * LEAST_DOUBT, False, not here)
    fitted = _fitted(alike, here)
    common = 1.0 if here else ANOTHER_CARD
    shared = common * fitted.spread**2 * np.array([_likeness(case, row.case) for row in alike])
    weights = fitted.inverse @ shared
    moved = fitted.mean + float(weights @ (fitted.left - fitted.mean))
    unknown = max(fitted.spread**2 - float(weights @ shared), 0.0)
    near = here and any((row.case.model, row.case.precision) == (case.model, case.precision) for row in alike)
    return Correction(math.exp(moved), math.hypot(math.sqrt(unknown), NOISE), near, not here)


def _likeness(a: ModelCase, b: ModelCase) -> float:
    kind, model, precision = ALIKE
    same = a.model == b.model
    common = kind + model * same + precision * (same and a.precision == b.precision)
    far = (math.log2(a.batch / b.batch) ** 2 + math.log2(a.context / b.context) ** 2) / DOUBLINGS[a.kind] ** 2
    return common * math.exp(-far / 2)


@dataclass(frozen=True)
class Known:
    """All whole-model rows of one card."""

    gpu: str
    rows: tuple[ModelRow, ...]


@cache
def known(family: Family) -> Known | None:
    """The rows of the family; of any other where it has none."""
    files = [file_of(family.name), *sorted(file_of("").parent.glob("*.json"))]
    found = next((file for file in files if file.exists()), None)
    if found is None:
        return None
    file = read(found)
    return Known(file.gpu, file.rows)
