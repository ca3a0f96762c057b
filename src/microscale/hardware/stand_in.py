"""Another card's kernels on the GPU at hand (``--as CARD``), on all of its SMs or a part of them: the rates that they
have there."""

from __future__ import annotations

from dataclasses import replace

from microscale.hardware.families import KNOWN, Feature, Gpu, Peak
from microscale.hardware.fit import STREAMED
from microscale.hardware.reach import reach

MMA_SYNC = 0.62
"""Of an H200's matrix rate that mma.sync reaches, which cards without wgmma run: 0.62 in public microbenchmarks."""


def stand_in(
    base: str, card: str | None, sms: int | None = None,
    read_gbs: float | None = None, streamed_gbs: float | None = None,
) -> Gpu:  # fmt: skip
    """A record of the GPU that ran the rows: ``card``'s kernels on ``sms`` SMs of ``base``. ``read_gbs``: what a plain
    read was measured to reach there, since a part of the SMs does not get all of the memory's bandwidth.
    ``streamed_gbs``: what a kernel of ours did, which holds fewer bytes in flight on each of these SMs than a plain
    read does. The slower of the two says what reading reaches."""
    here = KNOWN[base]
    played = KNOWN[card or base]
    num_sms = sms or here.num_sms
    share = num_sms / here.num_sms
    if here.has(Feature.WGMMA) and not played.has(Feature.WGMMA):
        share *= MMA_SYNC
    fp8 = here.peak.fp8 * share if here.peak.fp8 and played.peak.fp8 else None
    peak = Peak(here.peak.bf16 * share, fp8, None)
    full = reach(here).gbs
    reached = min(full, read_gbs or full, streamed_gbs / STREAMED if streamed_gbs else full) / full
    return replace(played, num_sms=num_sms, bandwidth_gbs=here.bandwidth_gbs * reached, peak=peak, runs_on=base)


def library_rates(gpu: Gpu) -> Gpu:
    """The rates of torch's own kernels: on a stand-in they are those of the GPU that it runs on."""
    if gpu.runs_on is None:
        return gpu
    here = KNOWN[gpu.runs_on]
    share = gpu.num_sms / here.num_sms
    peak = Peak(here.peak.bf16 * share, here.peak.fp8 and here.peak.fp8 * share, here.peak.fp4)
    return replace(gpu, peak=peak)
