"""Launches of dense layers for small batches, and the rule that chooses their tiles. ``small_batch_jit`` computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from microscale.hardware import Feature, Gpu
from microscale.kernels.dense import small_batch_jit as jit
from microscale.kernels.dense.packed import PackedDense
from microscale.kernels.dense.spec import Logits
from microscale.kernels.launch import launch
from microscale.kernels.layouts import TILE_ROWS
from microscale.kernels.numbers import cdiv

COLUMNS = (8, 16)
"""Tokens that one program serves."""
MAX_TOKENS = COLUMNS[-1]
"""Up to which the weights are read once."""
MAX_TOKENS_FEW_ROWS = 64
MAX_PROGRAMS_PER_SM = 6
"""Up to which further blocks of tokens, for which the weights come from L2, take less than the GEMM: two waves (H200,
MXFP4 and MXFP8, 2880 x 4096: 32 tokens 8 and 10 us, 64 tokens 17 and 18, the GEMM 23 to 25; 5120 x 2880: 32 tokens 12
and 14, the GEMM 17 and 19; 64 tokens, 10 programs an SM, 24 and 25, the GEMM 21 and 22)."""
BITS = {"bf16": 16, "fp8": 8, "mxfp8": 8, "mxfp4": 4}
SCALES = {"bf16": jit.NONE, "fp8": jit.CHANNEL, "mxfp8": jit.GROUP, "mxfp4": jit.GROUP}
MMA = r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32"
# Tiles of a batch, by tokens of a program. 8 tokens: as measured on an H200, lm_head with one token: fp8 138 us with 3
# and with 5, mxfp8 143 with 3 and 142 with 4, bf16 275 with 2. 16 tokens: what 168 registers hold without a spill on
# every SM.
AHEAD = {
    8: {"bf16": 2, "fp8": 3, "mxfp8": 3, "mxfp4": 4},
    16: {"bf16": 2, "fp8": 2, "mxfp8": 2, "mxfp4": 2},
}
# Few rows, 8 tokens of a program: a slice of K has a dozen tiles, and each batch is a wait for the memory (H200, one
# token, 24 layers in one graph, 5120 x 2880: 8.9 us with 3, 9.3 with 2, 9.5 with 4; 2880 x 4096: 8.6, 8.5, 8.7).
AHEAD_FEW_ROWS = {"bf16": 3}
# Row tiles enough for 16 warps on every SM; with fewer, slices of K fill the card (H200, one token, 5120 x 2880 bf16:
# four slices 9.9 us, eight 12.3, sixteen 16.5, two 11.4; cuBLAS 10.7).
MANY_ROWS_PER_SM = 256
# Rows for which three programs on every SM are enough, at 16 rows a program; for more, four with fewer registers.
ONE_WAVE_ROWS_PER_SM = 48
TWO_ROW_TILES_A_WARP = 8
SPILLS = "two words, outside of the loop; with 168 registers nothing spills and 16 tokens take 113 us, not 108"
FOUR_PROGRAMS = 128
"""Registers of a thread with which an SM holds four programs of four warps."""
# Rows that are at most two programs an SM: warps along K, tiles ahead and registers (H200, one token: 24 layers of
# gpt-oss-20b 1091 us, with four warps, 3 tiles and 168 registers 1101; 30 of Gemma 4 1458 and 1492).
TWO_PROGRAMS_ROWS_PER_SM = 32
TWO_PROGRAMS = {"bf16": (4, 4, 255), "mxfp8": (8, 2, 128)}
# Tiles ahead where four programs share an SM (30 layers of Gemma 4: 1491 us with 1, 1507 with 2).
AHEAD_CROWDED = {"mxfp8": 1}


@dataclass(frozen=True)
class Tiles:
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

    def constants(self) -> dict[str, int]:
        sizes = {"N": self.columns, "B": self.row_tiles, "WARPS_N": self.warps_n}
        return sizes | {"SLICES": self.slices, "AHEAD": self.ahead}


def choose(weight_format: str, rows: int, tokens: int, gpu: Gpu) -> Tiles:
    """Many rows: a warp for one or two row tiles. Few: four warps share one along K, so that the card is full."""
    columns = next((size for size in COLUMNS if tokens <= size), COLUMNS[-1])
    many, fewest, few, crowded = possible(weight_format, columns, gpu)
    if rows >= MANY_ROWS_PER_SM * gpu.num_sms:
        return many
    if rows <= TWO_PROGRAMS_ROWS_PER_SM * gpu.num_sms:
        return fewest
    return few if rows <= ONE_WAVE_ROWS_PER_SM * gpu.num_sms else crowded


def takes(tokens: int, rows: int, gpu: Gpu) -> bool:
    """Whether this kernel is the one for so many tokens, and not a GEMM."""
    programs = cdiv(tokens, MAX_TOKENS) * cdiv(rows, TILE_ROWS)
    few = tokens <= MAX_TOKENS_FEW_ROWS and programs <= MAX_PROGRAMS_PER_SM * gpu.num_sms
    return tokens <= MAX_TOKENS or few


def possible(weight_format: str, columns: int, gpu: Gpu) -> tuple[Tiles, Tiles, Tiles, Tiles]:
    """What ``choose`` may return on this card: for many rows, for the fewest, for few, and for those few that are more
    than one wave."""
    ahead = AHEAD[columns][weight_format]
    few = AHEAD_FEW_ROWS.get(weight_format, ahead) if columns == COLUMNS[0] else ahead
    if not gpu.has(Feature.WGMMA):  # elsewhere nothing was measured, and fewer registers spill
        return Tiles(columns, 4, 4, 1, ahead, 255), *3 * (Tiles(columns, 1, 1, 4, few, 255),)
    # Three programs of four warps an SM.
    slices = Tiles(columns, 1, 1, 4, few, 168)
    # Gemma 4's QKV, 8192 x 2816 MXFP8, is 512 programs: 1.3 waves of three an SM, one of four (1.6 us less of 9.5).
    crowded, fewest = slices, slices
    if columns == COLUMNS[0]:
        crowded = replace(slices, ahead=AHEAD_CROWDED.get(weight_format, 2), registers=FOUR_PROGRAMS)
        if weight_format in TWO_PROGRAMS:
            fewest = Tiles(columns, 1, 1, *TWO_PROGRAMS[weight_format])
    return _many_rows(weight_format, columns), fewest, slices, crowded


def _many_rows(weight_format: str, columns: int) -> Tiles:
    """As measured on an H200 at lm_head's size."""
    if columns == COLUMNS[0] and weight_format == "mxfp4":
        # One token 83 us; three programs an SM, 4 tiles ahead 93.
        return Tiles(columns, 4, 4, 1, 3, FOUR_PROGRAMS)
    if columns == COLUMNS[-1] and weight_format != "bf16":
        # Two row tiles a warp: half the tokens read from L1, whose data path was 77 % busy (MXFP4). 16 tokens: fp8 144
        # us, mxfp8 162, mxfp4 108; one row tile, 2 ahead, 168 registers 157, 176, 130.
        return Tiles(columns, TWO_ROW_TILES_A_WARP, 4, 1, 1, FOUR_PROGRAMS)
    return Tiles(columns, 4, 4, 1, AHEAD[columns][weight_format], 168)


def _launch(fn: Any, packed: PackedDense, gpu: Gpu, tokens: int, arguments: tuple[Any, ...], tiles: Tiles) -> None:
    pdl, fmt = gpu.has(Feature.PDL), packed.format
    constants = {"BITS": BITS[fmt], "SCALES": SCALES[fmt].value, **tiles.constants(), "PDL": pdl}
    options: dict[str, Any] = {"num_warps": tiles.warps, "maxnreg": tiles.registers}
    if pdl:
        options["launch_pdl"] = True
    grid = (cdiv(tokens, tiles.columns), cdiv(packed.rows, tiles.rows))
    reason = SPILLS if fmt == "mxfp4" and tiles.row_tiles == TWO_ROW_TILES_A_WARP else None
    launch(fn, grid, arguments, constants, options, MMA, reason)


def run(packed: PackedDense, gpu: Gpu, x: Tensor, residual: Tensor | None, tiles: Tiles | None = None) -> Tensor:
    """``x [tokens, k]`` bf16 → bf16 ``[tokens, rows]``. No host synchronisation; sizes follow from shapes."""
    tokens = x.shape[0]
    y = torch.empty((tokens, packed.rows), dtype=torch.bfloat16, device=x.device)
    if not tokens:
        return y
    tiles = tiles or choose(packed.format, packed.rows, tokens, gpu)
    arguments = (
        *_inputs(packed, x), _or(residual, x), y,
        tokens, packed.rows, packed.k, x.stride(0), packed.rows if residual is None else residual.stride(0),
        int(packed.bias is not None), int(residual is not None),
    )  # fmt: skip
    _launch(jit.small_batch, packed, gpu, tokens, arguments, tiles)
    return y


def run_logits(
    packed: PackedDense, gpu: Gpu, x: Tensor, softcap: float | None = None, tiles: Tiles | None = None
) -> Logits:
    """``x [tokens, k]`` bf16 → float32 logits, capped if so wished, with their blocks, in one launch."""
    tokens = x.shape[0]
    tiles = tiles or choose(packed.format, packed.rows, tokens, gpu)
    out = empty_logits(tokens, packed.rows, tiles.rows, x.device)
    if tokens:
        arguments = (
            *_inputs(packed, x),
            out.values, out.block_max, out.block_argmax, out.block_sum,
            tokens, packed.rows, packed.k, x.stride(0), int(packed.bias is not None), softcap or 0.0,
        )  # fmt: skip
        _launch(jit.small_batch_logits, packed, gpu, tokens, arguments, tiles)
    return out


def empty_logits(tokens: int, rows: int, block_rows: int, device: torch.device) -> Logits:
    """Room for an answer."""
    blocks = cdiv(rows, block_rows)
    return Logits(
        torch.empty((tokens, rows), dtype=torch.float32, device=device),
        torch.empty((tokens, blocks), dtype=torch.float32, device=device),
        torch.empty((tokens, blocks), dtype=torch.int32, device=device),
        torch.empty((tokens, blocks), dtype=torch.float32, device=device),
        block_rows,
    )


def _inputs(packed: PackedDense, x: Tensor) -> tuple[Tensor, ...]:
    scales = (_or(packed.groups, x), _or(packed.channels, x), _or(packed.bias, x))
    return x, packed.weight.view(torch.int32), *scales  # bf16 weights are read as words of two


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer that the kernel does not follow stands in for a tensor that is not there."""
    return other if tensor is None else tensor
