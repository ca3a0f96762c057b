"""Tiles of the GEMMs that decode weights on their way into the matrix unit: the experts' grouped ones, and dense ones.

``choose`` takes what was measured on the family; without an entry the rule below knows the card's shared memory and
registers. ``possible`` lists all that ``choose`` may ever return for a card. A tile that does not fit is never
returned: the rule does not make it, and a file that holds one is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from microscale.errors import Unsupported
from microscale.hardware.cards import Family, Feature, Gpu
from microscale.hardware.tiles.tuned import Kernels, Section, measured

BLOCK_MS = (16, 32, 64, 128)
MAX_STAGES = 4
# wgmma takes at least 8 columns, and the tail of an expert runs in a quarter of the tile.
WGMMA_BLOCK_MS = (32, 64, 128)
WGMMA_STAGES = (8, 6, 5, 4)
RESIDENT_BLOCK_MS = {2: (256,), 3: (64, 128)}
"""Columns of the resident kernel on wgmma, by its groups of four warps that multiply, 64 rows each. One more loads."""
# Accumulators of one thread. 64 make 150 to 200 registers on every SM; 128 fit where the matrix unit reads the tokens
# from shared memory (wgmma); more fit nowhere.
MAX_ACCUMULATORS = 128
# The same where a dense GEMM's epilogue adds a residual or summarises logits: with 128 it spills 48 to 464 bytes on
# SM90, where the experts' grouped GEMM just fits.
MAX_DENSE_ACCUMULATORS = 64
LOGIT_TOKENS = 64
"""Tokens of the largest tile that also summarises logits: with 128 that spills on SM100 (72 to 88 bytes)."""
RESIDENT_W8_BLOCK_MS = (128, 256)
"""Those that the rule gives MXFP8 weights: 128 up to 170 pairs an expert, where 256 columns would be half empty."""
# Of a thread that multiplies and of one that loads in the resident kernel, by groups that multiply. A program starts
# with as many as all its threads can have alike, a multiple of 8 (168, 128), and shares those out.
RESIDENT_REGISTERS = {2: (208, 96), 3: (144, 80)}
BUSY_PAIRS = 1 << 20
"""More pairs for one expert than any bucket ends at."""


class GemmPath(StrEnum):
    """The kinds of grouped GEMM: weight bits, and the bits of the activations that they meet."""

    W4A16 = "w4a16"
    W8A16 = "w8a16"
    W4A8 = "w4a8"
    W8A8 = "w8a8"
    W4A4 = "w4a4"
    W4A16_WGMMA = "w4a16_wgmma"
    W4A8_WGMMA = "w4a8_wgmma"
    W8A16_WGMMA = "w8a16_wgmma"

    @property
    def weight_bits(self) -> int:
        return 4 if self.startswith("w4") else 8

    @property
    def activation_bits(self) -> int:
        return next(bits for bits in (4, 8, 16) if f"a{bits}" in self)

    @property
    def wgmma(self) -> bool:
        """Weights converted in registers for ``wgmma``, in a kernel of its own."""
        return self.endswith("_wgmma")

    @property
    def passing_block_ms(self) -> tuple[int, ...]:
        """Columns of programs on ``wgmma`` that end with their tile. MXFP8 weights have resident ones alone."""
        return () if self is GemmPath.W8A16_WGMMA else WGMMA_BLOCK_MS

    @property
    def block_scaled(self) -> bool:
        """Activations in MXFP8 or NVFP4, scales inside the matrix instruction."""
        return self in (GemmPath.W4A8, GemmPath.W8A8, GemmPath.W4A4)

    @property
    def block_k(self) -> int:
        # Whole words of scales where activations have scales.
        return 128 if self.block_scaled else 64


@dataclass(frozen=True)
class GemmTile:
    """The shape of one program of a grouped GEMM."""

    block_m: int
    """Pairs (tokens) of one expert."""
    block_n: int
    """Weight rows."""
    block_k: int
    warps: int
    stages: int

    def shared_bytes(self, path: GemmPath, family: Family) -> int:
        """An upper bound on the shared memory that a compiler may need for this tile."""
        activations = self.block_m * self.block_k * path.activation_bits // 8
        weights = self.block_n * self.block_k * path.weight_bits // 8
        group = 16 if path is GemmPath.W4A4 else 32
        scales = (self.block_n + (self.block_m if path.block_scaled else 0)) * self.block_k // group
        # tcgen05 cannot read its left operand from registers: the unpacked weights are in shared memory, once.
        unpacked = self.block_n * self.block_k * (1 if path.block_scaled else 2)
        loop = self.stages * (activations + weights + scales) + (unpacked if Feature.TCGEN05 in family.features else 0)
        if self.resident(path):
            # All groups store while the next tiles arrive: 64 x 64 sums in bf16, and what belongs to their columns.
            unread = self.stages * 128 if self.groups == 3 else 0  # scales of a fourth
            return loop + unread + self.groups * (64 * (64 + 8) * 2 + 8 * self.block_m) + 1024
        # The accumulators of a part change layout before they are stored; rows are padded by 16 bytes.
        epilogue = self.part_m(family) * (self.block_n + 4) * 4
        return max(loop, epilogue)

    def resident(self, path: GemmPath) -> bool:
        """Whether programs stay on their SM and take one piece of work after the other."""
        return path.wgmma and self.groups > 1

    @property
    def groups(self) -> int:
        """Groups of four warps that multiply."""
        return self.warps // 4

    def part_m(self, family: Family) -> int:
        """Columns of one matrix product. Units that take whole tiles: all. ``mma.sync``: so few that the compiler lays
        all warps along the rows, and each unpacks its own weights once; in 2 x 2 warps bf16 weights cross shared
        memory and E4M3 ones are unpacked twice."""
        whole = not family.features.isdisjoint({Feature.WGMMA, Feature.TCGEN05})
        return self.block_m if whole else min(self.block_m, 8 * self.warps)

    def overlaps(self, path: GemmPath) -> bool:
        """Whether on ``wgmma`` the next K tile is converted while one is in the matrix unit: 16 more registers a row
        tile, 8 in E4M3. With 128 accumulators bf16 has none to spare."""
        return path.activation_bits == 8 or self.accumulators() <= 64

    def accumulators(self) -> int:
        """float32 accumulators of one thread."""
        return self.block_m * self.block_n // (32 * self.warps)

    def misfit(self, path: GemmPath, family: Family) -> str | None:
        """Why this tile cannot run on the family's cards, or ``None``."""
        shared = self.shared_bytes(path, family)
        if shared > family.shared_per_block:
            return f"needs {shared} bytes of shared memory, family {family.name} offers {family.shared_per_block}"
        if self.accumulators() > MAX_ACCUMULATORS:
            return f"needs {self.accumulators()} accumulators a thread, more than {MAX_ACCUMULATORS} spill"
        if self.block_k != path.block_k:
            return f"has block_k {self.block_k}, {path} runs in steps of {path.block_k}"
        if self.resident(path) and (reason := self._resident_misfit()):
            return reason
        if path.wgmma and not self.resident(path) and self.block_m not in path.passing_block_ms:
            return f"has {self.block_m} columns and {self.warps} warps, with which {path} does not run"
        if self.resident(path) and self.stages < WGMMA_STAGES[-1]:
            return f"has {self.stages} stages, and {path} holds {WGMMA_STAGES[-1] - 1} of them at once"
        return None

    def _resident_misfit(self) -> str | None:
        if self.block_m not in RESIDENT_BLOCK_MS.get(self.groups, ()):
            return f"has {self.block_m} columns, with {self.warps} warps there are none so wide"
        if self.block_n != 64 * self.groups:
            return f"has {self.block_n} rows, with {self.warps} warps there are {64 * self.groups}"
        return None


@dataclass(frozen=True)
class GemmCase:
    """Experts with at most ``up_to`` pairs each."""

    path: GemmPath
    up_to: int


SECTION = Section(Kernels.GROUPED_GEMM, GemmCase, GemmTile, lambda key, tile, family: tile.misfit(key.path, family))


def measured_tile(path: GemmPath, gpu: Gpu, pairs: int, num_experts: int) -> GemmTile | None:
    """The tile that was measured on the card's family for this many pairs an expert."""
    per_expert = -(-pairs // num_experts)
    rows = measured(SECTION, gpu.family).items()
    return next((row.tile for key, row in rows if key.path is path and per_expert <= key.up_to), None)


def choose(path: GemmPath, gpu: Gpu, pairs: int, num_experts: int, rows: int) -> GemmTile:
    """The tile for ``pairs`` (token, expert) pairs over ``num_experts`` experts whose matrices have ``rows`` rows."""
    return measured_tile(path, gpu, pairs, num_experts) or _by_rule(path, gpu, pairs, num_experts, rows)


def dense_tile(path: GemmPath, gpu: Gpu, tokens: int, rows: int, logits: bool) -> GemmTile:
    """The tile of a dense GEMM: that of one expert, with fewer tokens where its epilogue would spill."""
    tile = choose(path, gpu, min(tokens, LOGIT_TOKENS) if logits else tokens, 1, rows)
    return replace(tile, block_m=tile.block_m // 2) if tile.accumulators() > MAX_DENSE_ACCUMULATORS else tile


def _by_rule(path: GemmPath, gpu: Gpu, pairs: int, num_experts: int, rows: int) -> GemmTile:
    # The smallest tile that holds the mean share of an expert; on wgmma with a third to spare, since shares scatter and
    # a second tile converts all weights again (32 pairs: 740 µs in tiles of 64, 815 in tiles of 32).
    sizes = _rule_sizes(path, gpu.family)
    per_expert = -(-pairs // num_experts)
    if path is GemmPath.W8A16_WGMMA:
        return rule_tile(path, gpu, sizes[per_expert * 3 // 4 > sizes[0]])
    wanted = per_expert * 4 // 3 if path.wgmma else per_expert
    block_m = next((size for size in sizes if wanted <= size), sizes[-1])
    # With fewer programs than SMs smaller tiles fill the machine.
    while block_m > sizes[0] and max(min(num_experts, pairs), pairs // block_m) * (rows // 128) < gpu.num_sms:
        block_m //= 2
    return rule_tile(path, gpu, block_m)


def _rule_sizes(path: GemmPath, family: Family) -> tuple[int, ...]:
    if path.wgmma:
        return RESIDENT_W8_BLOCK_MS if path is GemmPath.W8A16_WGMMA else WGMMA_BLOCK_MS
    # In bf16 from registers 128 columns are slower than 64 whatever the share: 5970 against 4540 us on wgmma and 7920
    # against 6550 us with mma.sync at 256 pairs an expert (H200, gpt-oss-120b's layer, Triton 3.6.0).
    return BLOCK_MS if path.block_scaled or Feature.TCGEN05 in family.features else BLOCK_MS[:-1]


def rule_tile(path: GemmPath, gpu: Gpu, block_m: int) -> GemmTile:
    """The largest number of stages with which two programs share an SM, or else one runs alone."""
    if path is GemmPath.W8A16_WGMMA:
        groups = next(groups for groups, sizes in RESIDENT_BLOCK_MS.items() if block_m in sizes)
        resident = (GemmTile(block_m, 64 * groups, path.block_k, 4 * groups, stages) for stages in WGMMA_STAGES)
        fits = next((tile for tile in resident if tile.misfit(path, gpu.family) is None), None)
        if fits is None:
            raise Unsupported(f"No resident program of {path} fits on an SM of {gpu.name}.")
        return fits
    # 128 accumulators a thread leave too few registers on mma.sync.
    warps = 8 if block_m == BLOCK_MS[-1] and not path.wgmma else 4
    counts = WGMMA_STAGES if path.wgmma else range(MAX_STAGES, 1, -1)
    tiles = [GemmTile(block_m, 128, path.block_k, warps, stages) for stages in counts]
    # The driver keeps 1 KiB of shared memory for each block.
    paired = [tile for tile in tiles if 2 * (tile.shared_bytes(path, gpu.family) + 1024) <= gpu.family.shared_per_sm]
    alone = [tile for tile in tiles if tile.misfit(path, gpu.family) is None]
    return (paired or alone)[0]


def possible(path: GemmPath, gpu: Gpu) -> Iterator[GemmTile]:
    """Every tile that ``choose`` may return for this card, each once."""
    rows = [row for key, row in measured(SECTION, gpu.family).items() if key.path is path]
    seen = dict.fromkeys(row.tile for row in rows)
    if not rows or rows[-1].key.up_to < BUSY_PAIRS:
        seen |= dict.fromkeys(rule_tile(path, gpu, block_m) for block_m in _rule_sizes(path, gpu.family))
    yield from seen
