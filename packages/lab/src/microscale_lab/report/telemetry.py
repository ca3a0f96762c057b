"""Clocks, power, temperature and throttling while something runs, read from ``nvidia-smi`` once a second.

Nothing that identifies a machine is queried: no serial number, no UUID, no bus address.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
THROTTLED = "clocks_throttle_reasons.active"
SECOND = 1.0
# Bits of NVML's reasons for lower clocks that say the card could not keep up; idling (1) and fixed clocks (2) do not.
REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}


@dataclass
class Telemetry:
    """What was seen."""

    samples: list[tuple[float, ...]] = field(default_factory=list)
    throttled: dict[str, int] = field(default_factory=dict)
    missing: str | None = None
    """Why there are no samples."""

    def add(self, line: str) -> None:
        """One line of ``nvidia-smi``: numbers in the order of ``FIELDS``, then the bits."""
        *numbers, bits = (part.strip() for part in line.split(","))
        try:
            self.samples.append(tuple(float(number) for number in numbers))
        except ValueError:
            return
        for bit, name in REASONS.items():
            if bits.startswith("0x") and int(bits, 16) & bit:
                self.throttled[name] = self.throttled.get(name, 0) + 1

    def to_json(self) -> dict[str, Any]:
        names = ("sm_mhz", "memory_mhz", "power_w", "temperature_c")
        figures = {name: _range(column) for name, column in zip(names, zip(*self.samples, strict=True), strict=False)}
        said: dict[str, Any] = {"samples": len(self.samples), **figures, "throttled_samples": dict(self.throttled)}
        return said | ({} if self.missing is None else {"missing": self.missing})


def _range(values: Sequence[float]) -> dict[str, float]:
    return {"least": min(values), "median": statistics.median(values), "most": max(values)}


def sample(found: Telemetry, tool: str) -> bool:
    """Query once. ``False`` if there is no answer."""
    query = [tool, f"--query-gpu={','.join(FIELDS)},{THROTTLED}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        found.missing = f"nvidia-smi: {type(error).__name__}"
        return False
    for line in answer.stdout.strip().splitlines():
        found.add(line)
    return True


@contextmanager
def watched() -> Iterator[Telemetry]:
    """Inside, the GPU is queried once a second."""
    found = Telemetry()
    tool = shutil.which("nvidia-smi")
    if tool is None:
        found.missing = "there is no nvidia-smi"
        yield found
        return
    ended = threading.Event()

    def look() -> None:
        while sample(found, tool) and not ended.wait(SECOND):
            pass

    thread = threading.Thread(target=look, name="telemetry", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join(timeout=15)
