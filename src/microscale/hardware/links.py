"""Published times of a sum over two ranks on the links between cards. Pure facts and arithmetic.

Small tensors wait for the link and large ones for its bandwidth. Between the two NCCL changes its protocol, and the
time may double from one size to the next. So a link is a few published times, and others are interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from microscale.hardware.cards import Gpu

FULL_BYTES = 64 << 20
"""From this size on only the bandwidth counts. This is an assumption."""


@dataclass(frozen=True)
class Wait:
    """The range of published times, in microseconds."""

    low: float
    high: float

    @property
    def us(self) -> float:
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class CardLink:
    """How two cards are connected."""

    name: str
    what: str
    times: tuple[tuple[int, Wait], ...]
    """Bytes of a sum over two ranks → its time, the smallest first."""
    gbs: tuple[float, float]
    """Bandwidth each way: the slowest and the fastest that was published."""
    source: str
    date: str

    def wait(self, num_bytes: float, world: int = 2) -> Wait:
        """The time of one sum. More than two ranks send more, in a ring 2 (world - 1) / world of the bytes. They also
        wait for each other more often, which is not counted: there are no published times."""
        sent = num_bytes * 2 * (world - 1) / world
        slow, fast = self.gbs
        full = (FULL_BYTES, Wait(FULL_BYTES / fast / 1e3, FULL_BYTES / slow / 1e3))
        if sent >= FULL_BYTES:
            return Wait(sent / fast / 1e3, sent / slow / 1e3)
        points = (*self.times, full)
        low = _between([(size, wait.low) for size, wait in points], sent)
        return Wait(low, _between([(size, wait.high) for size, wait in points], sent))


def _between(points: Sequence[tuple[int, float]], sent: float) -> float:
    """Interpolate the logarithms of size and time; below the first point, its time."""
    if sent <= points[0][0]:
        return points[0][1]
    (a, before), (b, after) = next(pair for pair in pairwise(points) if sent <= pair[1][0])
    share = math.log(sent / a) / math.log(b / a)
    return math.exp((1 - share) * math.log(before) + share * math.log(after))


LINKS = {
    link.name: link
    for link in (
        CardLink(
            "roce200",
            "ConnectX-7, 200 Gbit/s, NCCL",
            (
                (8192, Wait(30.3, 35.2)),
                (16384, Wait(30.8, 31.7)),
                (32768, Wait(37.4, 39.6)),
                (65536, Wait(64.7, 67.9)),
            ),
            (18.9, 21.0),
            "two DGX Sparks: github.com/NVIDIA/dgx-spark-playbooks/pull/103, and issues/25 for the bandwidth",
            "2026-08",
        ),
        CardLink(
            "pcie-host",
            "PCIe through the host's memory, NCCL",
            # Sizes of four cards, by what each of them sends.
            (
                (8192, Wait(11.3, 14.0)),
                (49152, Wait(18.8, 19.0)),
                (98304, Wait(25.8, 25.9)),
                (1572864, Wait(152.7, 157.6)),
            ),
            (28.0, 35.0),
            "the smallest exchange of two RTX 4090, 11 to 12, and sums of four: "
            "github.com/tinygrad/open-gpu-kernel-modules/issues/17 and pull/22; RTX 5090, 14 without peer access: "
            "wumeicn.com/nvidia-rtx-5090-p2p-support-enabled-by-patched-driver; "
            "their bandwidth: github.com/NVIDIA/nccl/issues/1639",
            "2025-12-12",
        ),
        CardLink(
            "pcie-peer",
            "PCIe 5.0 with peer access, NCCL",
            ((8192, Wait(8.3, 8.3)), (65536, Wait(12.5, 12.5)), (524288, Wait(31.6, 31.6))),
            (34.9, 34.9),
            "exchanges of two cards: github.com/flashinfer-ai/flashinfer/pull/5023",
            "2026-09",
        ),
        CardLink(
            "nvlink",
            "NVLink",
            ((65536, Wait(6.0, 6.0)), (524288, Wait(7.0, 8.0))),
            (366.0, 366.0),
            "two H100: github.com/NVIDIA/nccl/issues/1259 and github.com/vllm-project/vllm/pull/24111; "
            "bandwidth of four: waynehacking8.github.io",
            "2025-09-02",
        ),
    )
}


def link_between(gpu: Gpu) -> CardLink | None:
    """The link between cards like this one, as they are sold; ``None`` for ranks on a CPU."""
    if gpu.is_cpu:
        return None
    if gpu.unified:
        return LINKS["roce200"]
    if gpu.memory_type.startswith("HBM"):  # cards with stacked memory are sold with it
        return LINKS["nvlink"]
    # The driver gives GeForce cards no access to each other's memory.
    return LINKS["pcie-host" if "GeForce" in gpu.name else "pcie-peer"]
