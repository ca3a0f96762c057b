"""What the GPU did in a run, from torch's trace: kernels in order, the named range each was launched in, and the gaps.

A kernel has the number of the call that launched it; the position of that call among the host's named ranges gives the
part that it belongs to. A replayed graph has one call for all its kernels. They are the kernels of the same step
without a graph and get their parts from there: the first of a name from the first of that name, and so on. (Branches of
a graph overlap, so that the order of different kernels may be another.)
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

OTHER = "other"
LAUNCH_GAP = "between kernels"
HOST_GAP = "host gap"
STEP = "step"


@dataclass(frozen=True)
class TracedKernel:
    """A kernel, copy or memset, microseconds since any beginning."""

    name: str
    start: float
    end: float
    step: int
    part: str


@dataclass(frozen=True)
class _Range:
    name: str
    start: float
    end: float


def read(path: Path, prefix: str) -> list[TracedKernel]:
    """The kernels launched in ranges named ``prefix + STEP``, by start; other ranges of ``prefix`` are parts."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        kinds[event.get("cat", "")].append(event)
    ranges = sorted(
        (
            _Range(event["name"].removeprefix(prefix), event["ts"], event["ts"] + event["dur"])
            for event in kinds["user_annotation"]
            if event["name"].startswith(prefix)
        ),
        key=lambda found: found.start,
    )
    steps = [found for found in ranges if found.name == STEP]
    parts = [found for found in ranges if found.name != STEP]
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in (*kinds["cuda_runtime"], *kinds["cuda_driver"])
        if "correlation" in event.get("args", {})
    }
    kernels = []
    for event in (*kinds["kernel"], *kinds["gpu_memcpy"], *kinds["gpu_memset"]):
        at = launched.get(event["args"].get("correlation"))
        step = None if at is None else _around(steps, at)
        if at is None or step is None:
            continue
        part = _around(parts, at)
        name = OTHER if part is None else parts[part].name
        kernels.append(TracedKernel(event["name"], event["ts"], event["ts"] + event["dur"], step, name))
    return sorted(kernels, key=lambda kernel: kernel.start)


def _around(ranges: Sequence[_Range], at: float) -> int | None:
    """The range that holds a moment; ranges are sorted and do not overlap."""
    index = bisect_right(ranges, at, key=lambda found: found.start) - 1
    return index if index >= 0 and at <= ranges[index].end else None


def name_parts(kernels: Sequence[TracedKernel], model: Sequence[TracedKernel]) -> list[TracedKernel]:
    """``kernels`` with the parts that ``model``, the same steps without graphs, has for them.

    The last step of ``model`` is the pattern. A kernel of which a step has more or fewer than the pattern keeps what it
    has, such as a copy that the step before began.
    """
    pattern = _parts_by_name(_step(model, max((kernel.step for kernel in model), default=0)))
    found: list[TracedKernel] = []
    for step in sorted({kernel.step for kernel in kernels}):
        mine = _step(kernels, step)
        same = {name for name, parts in _parts_by_name(mine).items() if len(parts) == len(pattern.get(name, ()))}
        nexts = {name: iter(pattern[name]) for name in same}
        found += [replace(kernel, part=next(nexts[kernel.name])) if kernel.name in same else kernel for kernel in mine]
    return sorted(found, key=lambda kernel: kernel.start)


def _parts_by_name(kernels: Sequence[TracedKernel]) -> dict[str, list[str]]:
    """The parts of the first, the second … kernel of each name."""
    found: dict[str, list[str]] = defaultdict(list)
    for kernel in kernels:
        found[kernel.name].append(kernel.part)
    return found


def _step(kernels: Sequence[TracedKernel], step: int) -> list[TracedKernel]:
    return [kernel for kernel in kernels if kernel.step == step]


def times(kernels: Sequence[TracedKernel]) -> dict[str, float]:
    """Microseconds of each part and of the gaps, in all. They add up to the time from the first step's first kernel to
    the last step's last: where kernels overlap, the time counts for the one that began first."""
    spent: dict[str, float] = defaultdict(float)
    first_of_step = {}
    for kernel in reversed(kernels):
        first_of_step[kernel.step] = kernel
    before: float | None = None
    for kernel in kernels:
        if before is not None and kernel.start > before:
            spent[HOST_GAP if first_of_step[kernel.step] is kernel else LAUNCH_GAP] += kernel.start - before
        spent[kernel.part] += max(0.0, kernel.end - (kernel.start if before is None else max(before, kernel.start)))
        before = kernel.end if before is None else max(before, kernel.end)
    return dict(spent)
