"""What each family of GPUs can do, and the cards that Microscale knows by name.

A family is a *set* of features. Nothing here is ordered: SM100 and SM120 are siblings, and what one has says nothing
about the other. To teach Microscale a new card, add a row to ``KNOWN``; a new family, add a ``Family`` and its SMs.

Rates are dense (no sparsity), from the vendor's sheets, within about 10 %; the shared memory per block is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from microscale.hardware.triton_faults import installed_triton

GIB = 1 << 30
WARP_SIZE = 32
LAUNCH_US = 2.5
"""What one kernel of a CUDA graph takes before its first and after its last byte, on any card. An estimate, and only
used where an implementation was not measured: a measured time holds its launches."""
UNCHAINED_US = 5.0
"""What a library's kernels take more inside of a step than alone, on a card with programmatic launches: the first
begins when the kernel before has ended, the kernel behind them when the last has. Two gaps; an estimate. (H200,
gpt-oss' lm_head of 1 to 4 tokens: cuBLAS is 5 to 9 us faster than ours alone, and 10 to 20 us slower in a step.)"""


class Feature(StrEnum):
    """Something a kernel may need. A kernel asks for features and never for a family."""

    MMA_BF16 = "mma.sync in bf16 and f16"
    MMA_FP8 = "mma.sync in fp8"
    MX_MMA = "block-scaled mma.sync (MXFP8, MXFP4)"
    WGMMA = "wgmma"
    TCGEN05 = "tcgen05"
    ASYNC_COPY = "cp.async"
    TMA = "tensor copies (TMA)"
    PDL = "programmatic dependent launch"
    CVT_E2M1 = "conversion from e2m1 in hardware"


@dataclass(frozen=True)
class Family:
    """Cards that run the same machine code well: one file of tuned tiles serves a whole family."""

    name: str
    features: frozenset[Feature]
    shared_per_block: int
    """Bytes of shared memory that one block may opt in to."""
    shared_per_sm: int
    triton_arch: str | None = None
    """Compile option ``arch`` that Triton needs to use the family's own instructions, where its default misses them."""


def _family(name: str, shared_per_block: int, *features: Feature, arch: str | None = None) -> Family:
    return Family(name, frozenset(features), shared_per_block, shared_per_block + 1024, arch)


_F = Feature
CPU_FAMILY = Family("cpu", frozenset(), 0, 0)
SM80 = _family("sm80", 166912, _F.MMA_BF16, _F.ASYNC_COPY)
SM86 = _family("sm86", 101376, _F.MMA_BF16, _F.ASYNC_COPY)
SM89 = _family("sm89", 101376, _F.MMA_BF16, _F.MMA_FP8, _F.ASYNC_COPY)
SM90 = _family("sm90", 232448, _F.MMA_BF16, _F.MMA_FP8, _F.WGMMA, _F.ASYNC_COPY, _F.TMA, _F.PDL)
SM100 = _family("sm100", 232448, _F.MMA_BF16, _F.MMA_FP8, _F.TCGEN05, _F.ASYNC_COPY, _F.TMA, _F.PDL, _F.CVT_E2M1)
# SM120 and SM121 have neither tcgen05 nor a TMA scatter. Before Triton 3.8 SM121 gets the block-scaled mma only when
# it compiles as sm120; its code runs on both.
SM120 = _family(
    "sm120", 101376, _F.MMA_BF16, _F.MMA_FP8, _F.MX_MMA, _F.ASYNC_COPY, _F.TMA, _F.PDL, _F.CVT_E2M1, arch="sm120"
)
# A card that is not in the table: what every NVIDIA GPU from Ampere on can do, and the smallest shared memory.
GENERIC = _family("generic", 101376, _F.MMA_BF16, _F.ASYNC_COPY)

FAMILY_OF_SM: dict[int, Family] = {
    80: SM80,
    86: SM86,
    89: SM89,
    90: SM90,
    100: SM100,
    103: SM100,
    120: SM120,
    121: SM120,
}


# Older than Ampere: no bf16 matrix units and no asynchronous copies. Listed, because families are sets and no order.
BEFORE_AMPERE = frozenset({30, 32, 35, 37, 50, 52, 53, 60, 61, 62, 70, 72, 75})


def capability_text(sm: int) -> str:
    """``90`` as people write it: ``9.0``."""
    return f"{sm // 10}.{sm % 10}"


@dataclass(frozen=True)
class Peak:
    """Dense matrix rates in TFLOP/s; ``None`` where the card has no such unit."""

    bf16: float
    fp8: float | None = None
    fp4: float | None = None


@dataclass(frozen=True)
class Gpu:
    """One GPU, real or from the table. Everything that a decision may depend on is in here."""

    name: str
    family: Family
    sm: int
    num_sms: int
    bandwidth_gbs: float
    peak: Peak
    memory_bytes: int
    unified: bool = False
    """Memory is shared with the CPU and the operating system (GB10)."""
    registers_per_sm: int = field(default=65536)
    triton: str | None = field(default_factory=installed_triton)
    """The version that compiles for it. What some versions get wrong: ``triton_faults``."""
    memory_type: str = "unknown"

    def has(self, feature: Feature) -> bool:
        return feature in self.family.features

    @property
    def capability(self) -> str:
        """The SM as people write it: ``9.0``."""
        return capability_text(self.sm)

    @property
    def shared_per_block(self) -> int:
        return self.family.shared_per_block

    @property
    def is_cpu(self) -> bool:
        return self.family is CPU_FAMILY


def _card(
    name: str, sm: int, sms: int, gbs: float, peak: tuple[float, ...], gib: float, memory: str, unified: bool = False
) -> Gpu:
    return Gpu(name, FAMILY_OF_SM[sm], sm, sms, gbs, Peak(*peak), int(gib * GIB), unified, memory_type=memory)


# name on the command line → card.                 SM  SMs  GB/s  BF16 / FP8 / FP4 TFLOP/s   GiB
KNOWN: dict[str, Gpu] = {
    "a100": _card("NVIDIA A100 80GB", 80, 108, 2039, (312,), 80, "HBM2e"),
    "rtx3090": _card("NVIDIA GeForce RTX 3090", 86, 82, 936, (71,), 24, "GDDR6X"),
    "rtx4090": _card("NVIDIA GeForce RTX 4090", 89, 128, 1008, (165, 330), 24, "GDDR6X"),
    "l40s": _card("NVIDIA L40S", 89, 142, 864, (362, 733), 45, "GDDR6"),
    "h100": _card("NVIDIA H100", 90, 132, 3350, (989, 1979), 80, "HBM3"),
    "h200": _card("NVIDIA H200", 90, 132, 4800, (989, 1979), 140, "HBM3e"),
    "b200": _card("NVIDIA B200", 100, 148, 8000, (2250, 4500, 9000), 179, "HBM3e"),
    "gb300": _card("NVIDIA GB300", 103, 152, 8000, (2500, 5000, 15000), 278, "HBM3e"),
    "rtx5090": _card("NVIDIA GeForce RTX 5090", 120, 170, 1792, (210, 419, 1676), 32, "GDDR7"),
    "rtxpro6000": _card("NVIDIA RTX PRO 6000 Blackwell", 120, 188, 1792, (504, 1008, 2015), 96, "GDDR7"),
    "gb10": _card("NVIDIA GB10", 121, 48, 273, (125, 250, 500), 120, "LPDDR5X", unified=True),
    # GeForce cards add up in float32 at half of the rate of the professional cards with the same chip. What a driver
    # reports of memory with error correction is less than the sheet's (L4, A10).
    "rtx3080": _card("NVIDIA GeForce RTX 3080", 86, 68, 760, (60,), 10, "GDDR6X"),
    "rtx3090ti": _card("NVIDIA GeForce RTX 3090 Ti", 86, 84, 1008, (80,), 24, "GDDR6X"),
    "a6000": _card("NVIDIA RTX A6000", 86, 84, 768, (155,), 48, "GDDR6"),
    "a10": _card("NVIDIA A10", 86, 72, 600, (125,), 22, "GDDR6"),
    "rtx4060ti": _card("NVIDIA GeForce RTX 4060 Ti", 89, 34, 288, (44, 88), 16, "GDDR6"),
    "rtx4080": _card("NVIDIA GeForce RTX 4080", 89, 76, 717, (97, 195), 16, "GDDR6X"),
    "rtx6000ada": _card("NVIDIA RTX 6000 Ada Generation", 89, 142, 960, (364, 729), 48, "GDDR6"),
    "l4": _card("NVIDIA L4", 89, 58, 300, (121, 242), 22, "GDDR6"),
    "h20": _card("NVIDIA H20", 90, 78, 4000, (148, 296), 95, "HBM3"),
    "b300": _card("NVIDIA B300", 103, 148, 8000, (2250, 4500, 13500), 268, "HBM3e"),
    "rtx5060ti": _card("NVIDIA GeForce RTX 5060 Ti", 120, 36, 448, (47, 95, 379), 16, "GDDR7"),
    "rtx5070ti": _card("NVIDIA GeForce RTX 5070 Ti", 120, 70, 896, (88, 176, 703), 16, "GDDR7"),
    "rtx5080": _card("NVIDIA GeForce RTX 5080", 120, 84, 960, (113, 225, 900), 16, "GDDR7"),
    "rtxpro4000": _card("NVIDIA RTX PRO 4000 Blackwell", 120, 70, 672, (188, 375, 750), 24, "GDDR7"),
    "rtxpro4500": _card("NVIDIA RTX PRO 4500 Blackwell", 120, 82, 896, (220, 439, 879), 32, "GDDR7"),
    "rtxpro5000": _card("NVIDIA RTX PRO 5000 Blackwell", 120, 110, 1344, (258, 516, 1032), 48, "GDDR7"),
}

# Card → cards of the same SM that together start every kernel that it starts. ``prove --gpu all`` and most tests are
# about those. ``tests/lab/prove/test_proved_by.py`` records the launches of both.
PROVED_BY: dict[str, tuple[str, ...]] = {
    "rtx3080": ("rtx3090",),
    "rtx3090ti": ("rtx3090",),
    "a6000": ("rtx3090",),
    "a10": ("rtx3090",),
    "rtx4080": ("rtx4090", "rtx4060ti"),
    "rtx6000ada": ("rtx4090",),
    "l4": ("rtx4060ti",),
    "b300": ("gb300",),
    "rtx5070ti": ("rtx5080",),
    "rtxpro4000": ("rtx5080",),
    "rtxpro4500": ("rtx5080",),
    "rtxpro5000": ("rtx5080",),
}
REPRESENTATIVES = tuple(name for name in KNOWN if name not in PROVED_BY)
