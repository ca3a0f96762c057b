"""What a card's memory and clocks give in practice, each with its source and date.

A data sheet's bandwidth is a ceiling that no kernel sees. Where somebody measured what reading reaches on a card, that
holds; elsewhere the sheet's figure times what cards with the same memory type reach. Clocks are the sheets' boost
clocks: together with the number of SMs they say how many instructions a card issues.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from microscale.hardware.families import KNOWN, Gpu
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
class Share:
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
MEMORY_TYPES: dict[str, Share] = {
    "HBM2e": Share(0.87, 0.92, "A800 1727 of 1935: github.com/mli/transformers-benchmarks/issues/4", "2023-04-13"),
    "HBM3": Share(0.90, 0.95, f"as HBM3e, H200: {HERE}", "2026-11-15"),
    "HBM3e": Share(0.90, 0.95, f"H200: {HERE}", "2026-11-15"),
    "GDDR6": Share(0.88, 0.93, "as GDDR6X, RTX 4090: github.com/krrishnarraj/clpeak/issues/106", "2023-05-20"),
    "GDDR7": Share(0.89, 0.935, "RTX 5090: github.com/Don-Chad/ninfer-3090/pull/17", "2026-09-01"),
    "unknown": Share(0.82, 0.95, "range of all memory types", "2026-11-16"),
}
# Name on the command line → memory type and boost clock in GHz, from the vendor's sheets.
SHEETS: dict[str, tuple[str, float]] = {
    "a100": ("HBM2e", 1.41),
    "rtx3090": ("GDDR6X", 1.70),
    "rtx4090": ("GDDR6X", 2.52),
    "l40s": ("GDDR6", 2.52),
    "h100": ("HBM3", 1.98),
    "h200": ("HBM3e", 1.98),
    "b200": ("HBM3e", 1.97),
    "gb300": ("HBM3e", 1.92),
    "rtx5090": ("GDDR7", 2.41),
    "rtxpro6000": ("GDDR7", 2.62),
    "gb10": ("LPDDR5X", 2.42),
}
UNKNOWN_CLOCK = 1.7


@lru_cache
def reach(gpu: Gpu) -> Reach:
    """What reading reaches on this card."""
    if gpu.is_cpu:
        return Reach(gpu.bandwidth_gbs, gpu.bandwidth_gbs, gpu.bandwidth_gbs, "an assumption", "2026-11-16", False)
    if gpu.runs_on is not None:
        return _scaled(CARDS[gpu.runs_on], gpu.bandwidth_gbs / KNOWN[gpu.runs_on].bandwidth_gbs)
    name = card_name(gpu)
    if name in CARDS:
        return CARDS[name]
    share = MEMORY_TYPES[SHEETS[name][0] if name in SHEETS else "unknown"]
    low, high = share.low * gpu.bandwidth_gbs, share.high * gpu.bandwidth_gbs
    return Reach((low + high) / 2, low, high, share.source, share.date, False)


def _scaled(found: Reach, share: float) -> Reach:
    """Of a part of the SMs."""
    return replace(found, gbs=found.gbs * share, low=found.low * share, high=found.high * share)


@lru_cache
def issue_rate(gpu: Gpu) -> float:
    """SMs times GHz: instructions of one kind that the card can start, in thousands of warps a microsecond."""
    name = gpu.runs_on or card_name(gpu)
    return gpu.num_sms * (SHEETS[name][1] if name in SHEETS else UNKNOWN_CLOCK)


assert set(SHEETS) == set(KNOWN), "every known card has its memory type and clock"
