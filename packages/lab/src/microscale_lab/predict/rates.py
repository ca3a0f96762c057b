"""The rates that the fit uses: bandwidth and instruction rate of a card, and those of a stand-in for another card.

A stand-in (``--as CARD``) runs another card's kernels on the GPU at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from microscale.hardware import KNOWN, Feature, Gpu, Peak, card_name
from microscale.hardware.reachable_bandwidth import CARDS, Reach, reach

STREAMED = 0.93
"""Share of a plain read's bandwidth that our best kernels reach: lm_head in BF16 91 %, a long decode 90 %."""
BOOST_GHZ = {
    "a100": 1.41, "rtx3090": 1.70, "rtx4090": 2.52, "l40s": 2.52, "h100": 1.98, "h200": 1.98, "b200": 1.97,
    "gb300": 1.92, "rtx5090": 2.41, "rtxpro6000": 2.62, "gb10": 2.42, "rtx3080": 1.71, "rtx3090ti": 1.86, "a6000": 1.80,
    "a10": 1.70, "rtx4060ti": 2.54, "rtx4080": 2.51, "rtx6000ada": 2.51, "l4": 2.04, "h20": 1.98, "b300": 1.92,
    "rtx5060ti": 2.57, "rtx5070ti": 2.45, "rtx5080": 2.62, "rtxpro4000": 2.62, "rtxpro4500": 2.62, "rtxpro5000": 2.29,
}  # fmt: skip
"""From the vendor's data sheets."""
UNKNOWN_GHZ = 1.7
MMA_SYNC = 0.62
"""Of an H200's matrix rate that mma.sync reaches, which cards without wgmma run: 0.62 in public microbenchmarks."""


@dataclass(frozen=True)
class StandIn(Gpu):
    """Another card's kernels on a GPU."""

    runs_on: str = ""
    """The card that runs them."""


def reach_of(gpu: Gpu) -> Reach:
    """The bandwidth that reading reaches."""
    return CARDS[gpu.runs_on] if isinstance(gpu, StandIn) else reach(gpu)


def issue_rate(gpu: Gpu) -> float:
    """SMs times GHz: instructions of one kind that the card can start, in thousands of warps a microsecond."""
    name = gpu.runs_on if isinstance(gpu, StandIn) else card_name(gpu)
    return gpu.num_sms * BOOST_GHZ.get(name or "", UNKNOWN_GHZ)


def stand_in(base: str, card: str) -> StandIn:
    """A record of the GPU that ran the rows: ``card``'s kernels on all SMs of ``base``."""
    here, played = KNOWN[base], KNOWN[card]
    share = MMA_SYNC if here.has(Feature.WGMMA) and not played.has(Feature.WGMMA) else 1.0
    fp8 = here.peak.fp8 * share if here.peak.fp8 and played.peak.fp8 else None
    peak = Peak(here.peak.bf16 * share, fp8, None)
    same = {field.name: getattr(played, field.name) for field in fields(Gpu)}
    rates = {"num_sms": here.num_sms, "bandwidth_gbs": here.bandwidth_gbs, "peak": peak}
    return StandIn(**same | rates, runs_on=base)


def library_rates(gpu: Gpu) -> Gpu:
    """The rates of torch's own kernels: on a stand-in they are those of the GPU that it runs on."""
    if not isinstance(gpu, StandIn):
        return gpu
    return replace(gpu, peak=KNOWN[gpu.runs_on].peak)
