"""Tiles of the small-batch expert GEMMs, of those with a dense MLP in their launches, and what registers they take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from microscale.hardware.cards import Family, Gpu
from microscale.hardware.tiles.tuned import Kernels, Section, measured

ANY_LOAD = float(1 << 20)
"""More row tiles for an SM than any row ends at."""
MAX_REGISTERS = 255
# The rule. With fewer warps than this on an SM the ramp of each warp shows, and two along K share a row tile (H200:
# 14.6 against 15.0 us for one token of gpt-oss-120b's gate_up, 8.9 against 10.9 for its down).
FEW_WARPS = 24
# To hide a microsecond of latency an SM needs as many KB in flight as it gets GB/s. Under 15 (all cards with GDDR or
# LPDDR; H200: 36) 16 warps with batches of 3 tiles of 544 bytes, 26 to 52 KB, are plenty, and take fewer registers.
SLOW_GBS_PER_SM = 15
SLOW_WARPS = 12
SLOW_AHEAD = 3
HALF_TILE_AHEAD = 4
"""Tiles of K in a batch of a list, at most, where K ends with half a tile: that takes a word or two more than 128
registers leave (1440 numbers, those of one rank of two of gpt-oss, with 5 ahead; Triton 3.6.0 and 3.7.1)."""
FACTORS_AHEAD = 1
"""Tiles of K in a batch of a list of FP8 blocks: with 2, 32 bytes spill, and 8 with 168 registers (SM 9.0, Triton
3.7.1)."""


class ExpertGemm(StrEnum):
    """The GEMMs that have tiles of their own."""

    GATE_UP_DIRECT = "gate_up_direct"
    DOWN_DIRECT = "down_direct"
    GATE_UP_LIST = "gate_up_list"
    """Of a list of tokens, which share an expert's weights."""
    DOWN_LIST = "down_list"
    GATE_UP_WITH_MLP = "gate_up_with_mlp"
    DOWN_WITH_MLP = "down_with_mlp"


LISTS = (ExpertGemm.GATE_UP_LIST, ExpertGemm.DOWN_LIST)
WITH_MLP = (ExpertGemm.GATE_UP_WITH_MLP, ExpertGemm.DOWN_WITH_MLP)


@dataclass(frozen=True)
class ExpertCase:
    """What a tile was measured for."""

    gemm: ExpertGemm
    bits: int
    """Of a weight."""
    tokens: int
    """At most."""
    top_k_from: int
    """Experts of a token, at least."""
    up_to: float
    """Row tiles for each SM, at most: over all pairs of a token and an expert, of a list over the experts that its
    tokens choose on average."""


@dataclass(frozen=True)
class ExpertTile:
    """The shape of one program."""

    row_tiles: int
    """Row tiles of 16 rows."""
    warps_n: int
    """Warps across the row tiles."""
    slices: int
    """Warps along K; their sums are added through shared memory."""
    ahead: int
    """Tiles of K in a batch; a warp keeps one to two batches in flight."""
    registers: int | None = None
    """At most, of a thread; without it, what ``max_registers`` says."""

    @property
    def warps(self) -> int:
        return self.warps_n * self.slices


@dataclass(frozen=True)
class ExpertShape:
    """What the choice depends on, of one of the two matrices of an expert."""

    row_tiles: int
    k_tiles: int
    bits: int
    experts: int
    """Of the layer."""
    half_tile: bool = False
    """K ends with half a tile, as that of a rank may."""
    factors: bool = False
    """FP8 blocks: two words of scales a tile, not one."""

    def chosen_row_tiles(self, tokens: int, top_k: int) -> float:
        """Of the experts that this many tokens choose on average, if each is as likely as another."""
        return self.row_tiles * self.experts * (1 - (1 - top_k / self.experts) ** tokens)


def _misfit(case: ExpertCase, tile: ExpertTile, family: Family) -> str | None:
    if case.bits not in (4, 8):
        return f"is for weights of {case.bits} bits; there are kernels for 4 and 8"
    if case.gemm in WITH_MLP and case.bits != 8:
        return f"is for weights of {case.bits} bits; with an MLP there are kernels for 8"
    if tile.registers is not None and not 24 <= tile.registers <= MAX_REGISTERS:
        return f"has {tile.registers} registers a thread, of which there are at most {MAX_REGISTERS}"
    if min(tile.row_tiles, tile.warps_n, tile.slices, tile.ahead) < 1 or tile.row_tiles % tile.warps_n:
        return "does not share its row tiles evenly among its warps"
    return None


SECTION = Section(Kernels.SMALL_BATCH_EXPERTS, ExpertCase, ExpertTile, _misfit)


def find(
    gemm: ExpertGemm, bits: int, tokens: int, top_k: int, row_tiles: float, gpu: Gpu
) -> tuple[ExpertCase, ExpertTile] | tuple[None, None]:
    """What was measured on the card's family for this GEMM. ``row_tiles``: as ``ExpertCase.up_to`` counts them."""
    for key, row in measured(SECTION, gpu.family).items():
        fits = key.gemm is gemm and key.bits == bits and tokens <= key.tokens and top_k >= key.top_k_from
        if fits and row_tiles <= key.up_to * gpu.num_sms:
            return key, row.tile
    return None, None


def direct_gate_up(shape: ExpertShape, tokens: int, top_k: int, gpu: Gpu) -> ExpertTile:
    """A warp for each row tile of each of the tokens' experts: all of them at once, with what registers that leaves."""
    pairs = tokens * top_k
    _, tile = find(ExpertGemm.GATE_UP_DIRECT, shape.bits, tokens, top_k, pairs * shape.row_tiles, gpu)
    return direct_by_rule(shape, tokens, top_k, gpu) if tile is None else _within(tile, shape)


def direct_down(shape: ExpertShape, tokens: int, top_k: int, gpu: Gpu) -> ExpertTile:
    """One row tile a program; its warps are the token's experts, and slices of K."""
    pairs = tokens * top_k
    _, tile = find(ExpertGemm.DOWN_DIRECT, shape.bits, tokens, top_k, pairs * shape.row_tiles, gpu)
    return direct_by_rule(shape, tokens, top_k, gpu) if tile is None else _within(tile, shape)


def direct_by_rule(shape: ExpertShape, tokens: int, top_k: int, gpu: Gpu) -> ExpertTile:
    """One row tile a program; its warps are slices of K."""
    # 16 warps of 128 registers would take a whole SM.
    split = tokens * top_k * shape.row_tiles < FEW_WARPS * gpu.num_sms and top_k <= 4 and shape.k_tiles > 1
    return _within(ExpertTile(1, 1, 2 if split else 1, _ahead(shape, gpu, 4)), shape)


def for_list(gemm: ExpertGemm, shape: ExpertShape, tokens: int, top_k: int, gpu: Gpu) -> ExpertTile:
    """Four row tiles, one for each warp; 16 warps of at most 128 registers on an SM."""
    tile = _of_list(gemm, shape, tokens, top_k, gpu) or ExpertTile(4, 4, 1, _ahead(shape, gpu, 5))
    if shape.factors and not _slow_memory(gpu):
        tile = replace(tile, ahead=FACTORS_AHEAD)
    return _within(tile, shape)


def for_own_list(gemm: ExpertGemm, shape: ExpertShape, tokens: int, top_k: int, gpu: Gpu) -> ExpertTile:
    """The same where programs find their tiles, which takes registers: by the rule a batch of MXFP4 has a tile less, or
    ptxas spills (SM 10.0)."""
    tile = _of_list(gemm, shape, tokens, top_k, gpu)
    return _within(ExpertTile(4, 4, 1, _ahead(shape, gpu, 4)) if tile is None else tile, shape)


def _of_list(gemm: ExpertGemm, shape: ExpertShape, tokens: int, top_k: int, gpu: Gpu) -> ExpertTile | None:
    """What was measured. With few tokens it follows the waves: an SM has room for 16 warps of 128 registers, 20 of 96
    and 24 of 80, and a wave that is a third full takes nearly as long as a whole one."""
    _, tile = find(gemm, shape.bits, tokens, top_k, shape.chosen_row_tiles(tokens, top_k), gpu)
    if tile is not None and shape.half_tile:
        return replace(tile, ahead=min(tile.ahead, HALF_TILE_AHEAD))
    return tile


def with_mlp(gemm: ExpertGemm, tokens: int, top_k: int, row_tiles: int, gpu: Gpu) -> ExpertTile | None:
    """MXFP8 experts with an MLP: registers for one wave are known only where they were measured."""
    return find(gemm, 8, tokens, top_k, row_tiles, gpu)[1]


def with_mlp_slices(gpu: Gpu) -> set[int]:
    """Slices of K that ``GATE_UP_WITH_MLP`` may have on this card; none where it was not measured."""
    rows = measured(SECTION, gpu.family).items()
    return {row.tile.slices for key, row in rows if key.gemm is ExpertGemm.GATE_UP_WITH_MLP}


def max_registers(tile: ExpertTile, warps: int, gpu: Gpu) -> int | None:
    """The most registers of a thread in a program with this many warps.

    ``None`` leaves it to ptxas, which aims at 16 warps an SM, 128 registers, and rather spills a word or two than take
    129. That many warps pay where memory is fast; elsewhere whole programs of up to 12 warps do, with all the registers
    that leaves them (168 for programs of 4 warps, 255 for one of 8), and nothing spills.
    """
    if tile.registers is not None or not _slow_memory(gpu):
        return tile.registers
    programs = max(1, SLOW_WARPS // warps)
    return min(MAX_REGISTERS, gpu.registers_per_sm // (32 * warps * programs) // 8 * 8)


def _within(tile: ExpertTile, shape: ExpertShape) -> ExpertTile:
    """With no more tiles ahead than a slice has."""
    most = -(-shape.k_tiles // tile.slices)
    return tile if tile.ahead <= most else replace(tile, ahead=most)


def _ahead(shape: ExpertShape, gpu: Gpu, tiles: int) -> int:
    """``tiles`` of MXFP4, or as many bytes of MXFP8."""
    return max(1, (SLOW_AHEAD if _slow_memory(gpu) else tiles) * 4 // shape.bits)


def _slow_memory(gpu: Gpu) -> bool:
    return gpu.bandwidth_gbs < SLOW_GBS_PER_SM * gpu.num_sms
