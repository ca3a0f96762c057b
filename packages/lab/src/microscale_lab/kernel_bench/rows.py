"""The table that every kernel benchmark prints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from microscale.errors import MicroscaleError
from microscale.kernels.launch import Launch, taken_by
from microscale_lab.kernel_bench.timing import Ceilings


class WrongResult(MicroscaleError):
    """A kernel's answer is not the reference's: no figure is printed for it."""


@dataclass(frozen=True)
class StartedKernels:
    """What one call starts."""

    path: str = ""
    """Which of the implementation's paths; for small ops the op."""
    launches: int = 0
    """Kernels of ours, one after the other."""
    programs: int = 0
    """Of the largest of them."""


@dataclass(frozen=True)
class KernelRow:
    """One measured case: what ran, how long it took, and how far that is from the card's own ceilings."""

    op: str
    case: str
    implementation: str
    us: float
    gbs: float
    tflops: float
    floor_us: float
    percent_of_ceiling: float
    rms_error: float
    memory_bound: bool
    unit: str = "bf16"
    """The matrix units whose ceiling it is held against."""
    other_us: float | None = None
    """The same work through torch (cuBLAS, SDPA), where torch can do it."""
    launched: StartedKernels = StartedKernels()


def row(
    op: str,
    case: str,
    implementation: str,
    us: float,
    num_bytes: float,
    flops: float,
    ceilings: Ceilings,
    rms_error: float,
    other_us: float | None = None,
    unit: str = "bf16",
) -> KernelRow:
    """A row from what was counted (bytes, operations) and measured."""
    floor = ceilings.floor_us(num_bytes, flops, unit)
    memory_bound = floor > ceilings.floor_us(0, flops, unit)
    rates = (num_bytes / us / 1e3, flops / us / 1e6)
    return KernelRow(
        op, case, implementation, us, *rates, floor, 100 * floor / us, rms_error, memory_bound, unit, other_us
    )


def check(name: str, case: str, gpu_name: str, error: float, allowed: float) -> None:
    """Refuse a figure for a wrong answer (NaN is wrong too)."""
    if not error <= allowed:
        raise WrongResult(f"{name} is off by {error:.1e} (allowed {allowed:.1e}) for {case} on {gpu_name}.")


def table(rows: Sequence[KernelRow]) -> str:
    """The rows as text: GB/s where memory is the limit, TFLOP/s where arithmetic is."""
    width = max((len(r.case) for r in rows), default=4)
    lines = [f"{'case':<{width}} {'us':>9} {'floor':>8} {'rate':>14} {'of ceiling':>11} {'torch us':>9} {'error':>9}"]
    for r in rows:
        rate = f"{r.gbs:.0f} GB/s" if r.memory_bound else f"{r.tflops:.0f} TFLOP/s"
        other = "" if r.other_us is None else f"{r.other_us:.1f}"
        line = f"{r.case:<{width}} {r.us:>9.1f} {r.floor_us:>8.1f} {rate:>14} {r.percent_of_ceiling:>10.0f}% {other:>9}"
        lines.append(f"{line} {r.rms_error:>9.1e}")
    return "\n".join(lines)


def as_json(rows: Sequence[KernelRow]) -> list[dict[str, object]]:
    return [asdict(r) for r in rows]


@contextmanager
def counting(path: str) -> Iterator[list[StartedKernels]]:
    """Inside, kernels start as usual. Afterwards the list holds what was started, by the path of this name."""
    grids: list[int] = []
    found: list[StartedKernels] = []

    def count(started: Launch) -> bool:
        grids.append(math.prod(started.grid))
        return True

    with taken_by(count):
        yield found
    found.append(StartedKernels(path, len(grids), max(grids, default=0)))
