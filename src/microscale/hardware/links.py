"""What a sum over two ranks takes on the links that join cards, as others measured it. Pure facts and arithmetic.

Small tensors wait for a link and large ones for its bandwidth; between the two NCCL changes its protocol, and a time
may double from one size to the next. So a link is a few published times, and what lies between them is interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from microscale.errors import BadSetting
from microscale.hardware.families import Gpu
from microscale.hardware.gpu import card_name
from microscale.hardware.reach import SHEETS
from microscale.hardware.sums import why_no_peers

FULL_BYTES = 64 << 20
"""From this size on a sum takes what its bytes take: an assumption."""


@dataclass(frozen=True)
class Wait:
    """A time in microseconds, and the range in which others found it."""

    low: float
    high: float

    @property
    def us(self) -> float:
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Link:
    """How two cards are joined."""

    name: str
    """As on the command line."""
    what: str
    times: tuple[tuple[int, Wait], ...]
    """Of sums of so many bytes on two ranks, the smallest first."""
    gbs: tuple[float, float]
    """Each way, from the slowest to the fastest that was seen."""
    source: str
    date: str

    def wait(self, num_bytes: float, world: int = 2) -> Wait:
        """Of one sum. More than two ranks send more: a ring 2 (world - 1) / world of the bytes. That they also wait for
        each other more often is not known and not counted."""
        sent = num_bytes * 2 * (world - 1) / world
        slow, fast = self.gbs
        full = (FULL_BYTES, Wait(FULL_BYTES / fast / 1e3, FULL_BYTES / slow / 1e3))
        if sent >= FULL_BYTES:
            return Wait(sent / fast / 1e3, sent / slow / 1e3)
        points = (*self.times, full)
        return Wait(*(_between([(size, end(wait)) for size, wait in points], sent) for end in (_low, _high)))


def _low(wait: Wait) -> float:
    return wait.low


def _high(wait: Wait) -> float:
    return wait.high


def _between(points: Sequence[tuple[int, float]], sent: float) -> float:
    """By logarithms of size and time; below the first point its time."""
    if sent <= points[0][0]:
        return points[0][1]
    (a, before), (b, after) = next(pair for pair in pairwise(points) if sent <= pair[1][0])
    share = math.log(sent / a) / math.log(b / a)
    return math.exp((1 - share) * math.log(before) + share * math.log(after))


LINKS = {
    link.name: link
    for link in (
        Link(
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
        Link(
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
        Link(
            "pcie-peer",
            "PCIe 5.0 through peer-mapped memory, one launch",
            ((8192, Wait(4.0, 8.3)), (65536, Wait(4.8, 12.5)), (524288, Wait(14.1, 31.6))),
            (34.9, 47.4),
            "exchanges of two cards, others' one launch and NCCL: github.com/flashinfer-ai/flashinfer/pull/5023",
            "2026-09",
        ),
        Link(
            "nvlink",
            "NVLink, NCCL or one launch",
            ((65536, Wait(6.0, 6.0)), (524288, Wait(7.0, 8.0))),
            (366.0, 366.0),
            "two H100: github.com/NVIDIA/nccl/issues/1259 and github.com/vllm-project/vllm/pull/24111; "
            "bandwidth of four: waynehacking8.github.io",
            "2025-09-02",
        ),
    )
}


def link_between(gpu: Gpu) -> Link | None:
    """What cards like this one are joined by, as they are sold; ``None`` for ranks on a CPU."""
    if gpu.is_cpu:
        return None
    if gpu.unified:
        return LINKS["roce200"]
    if _has_nvlink(gpu):
        return LINKS["nvlink"]
    return LINKS["pcie-peer" if why_no_peers(gpu) is None else "pcie-host"]


def _has_nvlink(gpu: Gpu) -> bool:
    """Cards with stacked memory are sold with it."""
    name = card_name(gpu)
    return name is not None and SHEETS[name][0].startswith("HBM")


def named_link(name: str) -> Link:
    if name not in LINKS:
        raise BadSetting(f"--link {name}: there is {', '.join(LINKS)}.")
    return LINKS[name]
