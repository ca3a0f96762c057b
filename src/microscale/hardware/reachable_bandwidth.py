"""The read bandwidth that kernels reach in practice, with source and date.

No kernel reaches a data sheet's bandwidth. Where somebody measured a card, that figure is used; for other cards it is
the data sheet's figure times the share that cards with the same memory type reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from microscale.hardware.cards import Gpu
from microscale.hardware.gpu import card_name

HERE = "measured for this project, docs/benchmarks.md"


@dataclass(frozen=True)
class Reach:
    """Read bandwidth that kernels can reach, in GB/s, with the range in which it is known."""

    gbs: float
    low: float
    high: float
    source: str
    date: str
    of_card: bool
    """Measured on this very kind of card, not only on its memory type."""

    @property
    def doubt(self) -> float:
        """Half of the range, as a fraction."""
        return (self.high - self.low) / (2 * self.gbs)


@dataclass(frozen=True)
class MemoryShare:
    """Which fraction of its data sheet a memory type reaches."""

    low: float
    high: float
    source: str
    date: str


# Cards that somebody measured. The middle of the range is what predictions use.
CARDS: dict[str, Reach] = {
    "h200": Reach(4550, 4390, 4550, HERE, "2026-11-15", True),
    "gb10": Reach(
        241, 231, 251, "read probe 231 to 234: github.com/antirez/ds4/issues/773; kernels up to 251", "2026-08-10", True
    ),
    "rtx5090": Reach(
        1674, 1600, 1690, "sustained read 1674.5: github.com/Don-Chad/ninfer-3090/pull/17", "2026-09-01", True
    ),
    "rtx3090": Reach(
        894, 870, 900, "sustained read 894.5: github.com/Don-Chad/ninfer-3090/pull/17", "2026-09-01", True
    ),
    "rtx4090": Reach(921, 909, 935, "clpeak 921: github.com/krrishnarraj/clpeak/issues/106", "2023-05-20", True),
    # The driver reports a bus of 7680 bits, 7.67 TB/s, and not the sheet's 8: times what an H200's HBM3e reaches.
    "b200": Reach(
        7150, 6800, 7270, "7672 by bus and clock: github.com/pytorch/ao/pull/4002; share of HBM3e", "2026-03-05", True
    ),
}
MEMORY_TYPES: dict[str, MemoryShare] = {
    "HBM2e": MemoryShare(
        0.87, 0.92, "A800 1727 of 1935: github.com/mli/transformers-benchmarks/issues/4", "2023-04-13"
    ),
    "HBM3": MemoryShare(0.90, 0.95, f"as HBM3e, H200: {HERE}", "2026-11-15"),
    "HBM3e": MemoryShare(0.90, 0.95, f"H200: {HERE}", "2026-11-15"),
    "GDDR6": MemoryShare(0.88, 0.93, "as GDDR6X, RTX 4090: github.com/krrishnarraj/clpeak/issues/106", "2023-05-20"),
    "GDDR6X": MemoryShare(
        0.90, 0.96, "RTX 3090 and 4090: github.com/Don-Chad/ninfer-3090/pull/17 and clpeak/issues/106", "2026-09-01"
    ),
    "GDDR7": MemoryShare(0.89, 0.935, "RTX 5090: github.com/Don-Chad/ninfer-3090/pull/17", "2026-09-01"),
    "unknown": MemoryShare(0.82, 0.95, "range of all memory types", "2026-11-16"),
}


@lru_cache
def reach(gpu: Gpu) -> Reach:
    """What reading reaches on this card."""
    if gpu.is_cpu:
        return Reach(gpu.bandwidth_gbs, gpu.bandwidth_gbs, gpu.bandwidth_gbs, "an assumption", "2026-11-16", False)
    name = card_name(gpu)
    if name in CARDS:
        return CARDS[name]
    share = MEMORY_TYPES.get(gpu.memory_type, MEMORY_TYPES["unknown"])
    low, high = share.low * gpu.bandwidth_gbs, share.high * gpu.bandwidth_gbs
    return Reach((low + high) / 2, low, high, share.source, share.date, False)
