"""Tiles of dense layers for few tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum

from microscale.hardware.cards import SM86, SM89, Family, Gpu
from microscale.hardware.tiles.tuned import Kernels, Section, measured

COLUMNS = (8, 16, 32)
"""Tokens that one program serves; see ``columns_of``."""
ANY_ROWS_TOKENS = 16
"""Tokens up to which layers of any number of rows run in these programs. Programs of 32 tokens are for layers of few
rows (``thresholds.Name.FEW_ROWS_TOKENS``): with many rows a GEMM's program shares each token among 128 of them."""
MAX_REGISTERS = 255
# How many rows a layer has, by what fills the card at 16 rows a program: one program on every SM, two, three, and 16
# warps of a row tile each. Below that slices of K fill it (H200, one token, 5120 x 2880 bf16: four slices 9.9 us, eight
# 12.3, sixteen 16.5, two 11.4; cuBLAS 10.7).
ONE_PROGRAM_ROWS_PER_SM = 16
TWO_PROGRAMS_ROWS_PER_SM = 32
ONE_WAVE_ROWS_PER_SM = 48
MANY_ROWS_PER_SM = 256


class DenseFormat(StrEnum):
    BF16 = "bf16"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    FP8_BLOCK = "fp8_block"


class Size(StrEnum):
    """How many rows a layer has, for the card. With several blocks of tokens each block's rows count."""

    ONE_PROGRAM = "one_program"
    """At most one program of 16 rows on every SM. Where nothing was measured, as ``TWO_PROGRAMS``."""
    TWO_PROGRAMS = "two_programs"
    """At most two."""
    ONE_WAVE = "one_wave"
    """At most three."""
    CROWDED = "crowded"
    """More, and fewer than ``MANY``."""
    MANY = "many"
    """A warp for each row tile fills the card."""


@dataclass(frozen=True)
class DenseCase:
    """What a tile was measured for."""

    format: DenseFormat
    columns: int
    size: Size


@dataclass(frozen=True)
class DenseTile:
    """The shape of one program."""

    columns: int
    """Tokens."""
    row_tiles: int
    """Row tiles of 16 rows."""
    warps_n: int
    """Warps across the row tiles."""
    slices: int
    """Warps along K; their sums are added through shared memory."""
    ahead: int
    """Tiles of K in a batch; a warp keeps one to two batches in flight."""
    registers: int
    """At most, of a thread. Left alone ptxas stops at 128 or 168 and rather spills a word or two."""

    @property
    def rows(self) -> int:
        return 16 * self.row_tiles

    @property
    def warps(self) -> int:
        return self.warps_n * self.slices


def columns_of(weight_format: DenseFormat) -> tuple[int, ...]:
    """Tokens of a program. More than 16 with bf16 weights are cuBLAS's (11 us for QKV at 64, on an H200)."""
    return COLUMNS[:-1] if weight_format is DenseFormat.BF16 else COLUMNS


def sizes_of(columns: int) -> tuple[Size, ...]:
    """The sizes of programs of so many tokens. 32 tokens of very few rows are a wave in blocks of 16."""
    return tuple(size for size in Size if (columns, size) != (COLUMNS[-1], Size.ONE_PROGRAM))


def _misfit(case: DenseCase, tile: DenseTile, family: Family) -> str | None:
    columns = columns_of(case.format)
    if case.columns not in columns or tile.columns != case.columns:
        sizes = f"{', '.join(map(str, columns[:-1]))} or {columns[-1]}"
        return f"serves {tile.columns} tokens; programs have {sizes}, as the key says"
    if case.size not in sizes_of(case.columns):
        return f"is for {case.columns} tokens of so few rows, which run in blocks of {COLUMNS[1]}"
    if not 24 <= tile.registers <= MAX_REGISTERS:
        return f"has {tile.registers} registers a thread, of which there are at most {MAX_REGISTERS}"
    if min(getattr(tile, field.name) for field in fields(tile)) < 1 or tile.row_tiles % tile.warps_n:
        return "does not share its row tiles evenly among its warps"
    return None


SECTION = Section(Kernels.SMALL_BATCH_DENSE, DenseCase, DenseTile, _misfit)

# The rule. Tiles of a batch, by tokens of a program: what 255 registers hold without a spill on every SM.
_AHEAD = {
    8: {DenseFormat.BF16: 2, DenseFormat.FP8: 3, DenseFormat.MXFP8: 3, DenseFormat.MXFP4: 4},
    16: {DenseFormat.BF16: 2, DenseFormat.FP8: 2, DenseFormat.MXFP8: 2, DenseFormat.MXFP4: 2},
    # Few rows are a wave of programs that wait for tokens more than for weights (H200, 5120 x 2880 MXFP4, 32 tokens: 1
    # ahead 11.1 us with 168 registers, 2 ahead 15).
    32: {DenseFormat.FP8: 1, DenseFormat.MXFP8: 1, DenseFormat.MXFP4: 1},
}
_CODES_OF = {DenseFormat.NVFP4: DenseFormat.MXFP4, DenseFormat.FP8_BLOCK: DenseFormat.MXFP8}
"""Formats without rows of their own → one with the same codes."""
# Where two row tiles of MXFP8 and 32 tokens spill 24 bytes (Triton 3.6), as those of FP8 blocks do everywhere: four
# warps side by side, and no slices.
_ONE_ROW_TILE_A_WARP = frozenset({SM86, SM89})


def columns_for(weight_format: str, rows: int, tokens: int, gpu: Gpu) -> int:
    """Tokens of a program. More than 16 go in blocks of 16 while their programs are one wave, and in blocks of 32 from
    there on (H200, MXFP4, 32 tokens: 2880 x 4096 8.6 us and 10.4, 5120 x 2880 12.7 and 11.1)."""
    columns = columns_of(DenseFormat(weight_format))
    for size in columns[:2]:
        if tokens <= size:
            return size
    wave = -(-tokens // columns[1]) * rows <= ONE_WAVE_ROWS_PER_SM * gpu.num_sms
    return columns[1] if wave else columns[-1]


def size_of(rows: int, gpu: Gpu) -> Size:
    if rows >= MANY_ROWS_PER_SM * gpu.num_sms:
        return Size.MANY
    if rows <= ONE_PROGRAM_ROWS_PER_SM * gpu.num_sms:
        return Size.ONE_PROGRAM
    if rows <= TWO_PROGRAMS_ROWS_PER_SM * gpu.num_sms:
        return Size.TWO_PROGRAMS
    return Size.ONE_WAVE if rows <= ONE_WAVE_ROWS_PER_SM * gpu.num_sms else Size.CROWDED


def choose(weight_format: str, rows: int, tokens: int, gpu: Gpu) -> DenseTile:
    """The tile that was measured on the card's family, for NVFP4 or else for MXFP4, for one program on every SM or else
    for two; or else the rule's."""
    columns = columns_for(weight_format, rows, tokens, gpu)
    # Past 16 tokens of bf16, which are cuBLAS's, the tile is still that of 16.
    blocks = -(-tokens // columns) if columns == COLUMNS[-1] else 1
    return tile_of(DenseCase(DenseFormat(weight_format), columns, size_of(blocks * rows, gpu)), gpu)


def tile_of(case: DenseCase, gpu: Gpu) -> DenseTile:
    rows = measured(SECTION, gpu.family)
    cases = [case]
    if case.format is DenseFormat.NVFP4:  # FP8 blocks have more scales than MXFP8, and would spill
        cases.append(replace(case, format=DenseFormat.MXFP4))
    if case.size is Size.ONE_PROGRAM:
        cases += [replace(each, size=Size.TWO_PROGRAMS) for each in cases]
    row = next((rows[each] for each in cases if each in rows), None)
    return by_rule(case, gpu.family) if row is None else row.tile


def by_rule(case: DenseCase, family: Family) -> DenseTile:
    """Many rows: a warp for a row tile. Fewer: four warps share one along K, so that the card is full. All registers:
    with fewer some SMs spill.

    32 tokens of more programs than one wave: two row tiles a warp and two warps side by side, so that a program
    reads its tokens from L2 for 64 rows."""
    ahead = _AHEAD[case.columns][_CODES_OF.get(case.format, case.format)]
    if case.size is Size.MANY:
        return DenseTile(case.columns, 4, 4, 1, ahead, MAX_REGISTERS)
    if case.columns == 32 and case.size is Size.CROWDED:
        spills = case.format is DenseFormat.MXFP8 and family in _ONE_ROW_TILE_A_WARP
        across = 4 if spills or case.format is DenseFormat.FP8_BLOCK else 2
        return DenseTile(case.columns, 4, across, 4 // across, ahead, MAX_REGISTERS)
    # A slice of K has a dozen tiles, and each batch is a wait for the memory.
    if case.format is DenseFormat.BF16 and case.columns == COLUMNS[0]:
        ahead = 3
    return DenseTile(case.columns, 1, 1, 4, ahead, MAX_REGISTERS)


def possible(weight_format: str, columns: int, gpu: Gpu) -> set[DenseTile]:
    """What ``choose`` may return on this card for this many tokens of a program."""
    return {tile_of(DenseCase(DenseFormat(weight_format), columns, size), gpu) for size in sizes_of(columns)}
