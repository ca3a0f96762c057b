"""What a system with unified memory takes before a model gets any, as owners saw it.

The GPU's memory is the system's: its programs, the page cache and the weights share it. The driver's figure of free
memory counts the page cache as taken; the kernel's ``MemAvailable`` does not. Weights that are read without the page
cache (as Microscale reads them) leave at most ``PAGE_CACHE`` there.
"""

from __future__ import annotations

from dataclasses import dataclass

from microscale.hardware.cards import GIB, Gpu

PAGE_CACHE = GIB
"""What reading a checkpoint may leave in the page cache."""


@dataclass(frozen=True)
class System:
    """One way to run such a machine."""

    name: str
    takes: int
    """Bytes that are not available to a model."""
    source: str
    date: str


# Of a GB10's 121.6 GiB. A desktop's own share is not published: this is the most that was seen taken.
SYSTEMS = (
    System("no desktop", 12 * GIB, "109 of 121 GiB available: github.com/JustVugg/colibri/issues/136", "2026-07-13"),
    System(
        "a desktop",
        20 * GIB,
        "the most that an owner saw taken, 102 of 121.7 GiB free (there without a desktop): "
        "github.com/MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks/issues/47",
        "2026-08-30",
    ),
)


def systems(gpu: Gpu) -> tuple[System, ...]:
    """How much the system takes where it shares the GPU's memory; nothing to say elsewhere."""
    return SYSTEMS if gpu.unified and not gpu.is_cpu else ()
