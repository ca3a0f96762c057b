"""Launches of dense layers for few tokens, and the rule that chooses their tiles. ``small_jit`` has the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from microscale.hardware import Feature, Gpu
from microscale.kernels.dense import small_jit as jit
from microscale.kernels.dense.packed import PackedDense
from microscale.kernels.dense.spec import Logits
from microscale.kernels.op import Variant

COLUMNS = (8, 16)
"""Tokens that one program serves."""
MAX_TOKENS = COLUMNS[-1]
BITS = {"bf16": 16, "fp8": 8, "mxfp8": 8, "mxfp4": 4}
SCALES = {"bf16": jit.NONE, "fp8": jit.CHANNEL, "mxfp8": jit.GROUP, "mxfp4": jit.GROUP}
MMA = r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32"
# Tiles of a batch, by tokens of a program. 8 tokens: as measured on an H200, lm_head with one token: fp8 138 us with 3
# and with 5, mxfp8 143 with 3 and 142 with 4, mxfp4 84 with 4 and 88 with 6, bf16 275 with 2. 16 tokens: what 168
# registers hold without a spill on every SM.
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
    """Many rows: a warp for each row tile. Few: four warps share one along K, so that the card is full."""
    columns = next((size for size in COLUMNS if tokens <= size), COLUMNS[-1])
    return possible(weight_format, columns, gpu)[0 if rows >= MANY_ROWS_PER_SM * gpu.num_sms else 1]


def possible(weight_format: str, columns: int, gpu: Gpu) -> tuple[Tiles, Tiles]:
    """What ``choose`` may return on this card: for many rows, for few."""
    ahead = AHEAD[columns][weight_format]
    few = AHEAD_FEW_ROWS.get(weight_format, ahead) if columns == COLUMNS[0] else ahead
    # Three programs of four warps an SM, where that was measured (H200) and where nothing spills with it.
    registers = 168 if gpu.has(Feature.WGMMA) else 255
    return Tiles(columns, 4, 4, 1, ahead, registers), Tiles(columns, 1, 1, 4, few, registers)


def options(gpu: Gpu, tiles: Tiles) -> dict[str, Any]:
    found: dict[str, Any] = {"num_warps": tiles.warps, "maxnreg": tiles.registers, "PDL": gpu.has(Feature.PDL)}
    return found | {"launch_pdl": True} if gpu.has(Feature.PDL) else found


def run(packed: PackedDense, gpu: Gpu, x: Tensor, residual: Tensor | None, tiles: Tiles | None = None) -> Tensor:
    """``x [tokens, k]`` bf16 → bf16 ``[tokens, rows]``. No host synchronisation; sizes follow from shapes."""
    tokens = x.shape[0]
    y = torch.empty((tokens, packed.rows), dtype=torch.bfloat16, device=x.device)
    if not tokens:
        return y
    tiles = tiles or choose(packed.format, packed.rows, tokens, gpu)
    jit.small[_grid(packed, tiles, tokens)](
        *_inputs(packed, x), _or(residual, x), y,
        tokens, packed.rows, packed.k, x.stride(0), packed.rows if residual is None else residual.stride(0),
        int(packed.bias is not None), int(residual is not None),
        **_format(packed.format), **tiles.constants(), **options(gpu, tiles),
    )  # fmt: skip
    return y


def run_logits(packed: PackedDense, gpu: Gpu, x: Tensor, tiles: Tiles | None = None) -> Logits:
    """``x [tokens, k]`` bf16 → float32 logits with their blocks, in one launch."""
    tokens = x.shape[0]
    tiles = tiles or choose(packed.format, packed.rows, tokens, gpu)
    out = empty_logits(tokens, packed.rows, tiles.rows, x.device)
    if tokens:
        jit.small_logits[_grid(packed, tiles, tokens)](
            *_inputs(packed, x),
            out.values, out.block_max, out.block_argmax, out.block_sum,
            tokens, packed.rows, packed.k, x.stride(0), int(packed.bias is not None),
            **_format(packed.format), **tiles.constants(), **options(gpu, tiles),
        )  # fmt: skip
    return out


def empty_logits(tokens: int, rows: int, block_rows: int, device: torch.device) -> Logits:
    """Room for an answer."""
    blocks = triton.cdiv(rows, block_rows)
    return Logits(
        torch.empty((tokens, rows), dtype=torch.float32, device=device),
        torch.empty((tokens, blocks), dtype=torch.float32, device=device),
        torch.empty((tokens, blocks), dtype=torch.int32, device=device),
        torch.empty((tokens, blocks), dtype=torch.float32, device=device),
        block_rows,
    )


def _grid(packed: PackedDense, tiles: Tiles, tokens: int) -> tuple[int, int]:
    return triton.cdiv(packed.rows, tiles.rows), triton.cdiv(tokens, tiles.columns)


def _format(weight_format: str) -> dict[str, int]:
    return {"BITS": BITS[weight_format], "SCALES": SCALES[weight_format].value}


def _inputs(packed: PackedDense, x: Tensor) -> tuple[Tensor, ...]:
    scales = (_or(packed.groups, x), _or(packed.channels, x), _or(packed.bias, x))
    return x, packed.weight.view(torch.int32), *scales  # bf16 weights are read as words of two


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer that the kernel does not follow stands in for a tensor that is not there."""
    return other if tensor is None else tensor


# ---- what prove compiles ---------------------------------------------------------------------------------------------

POINTERS = {
    "x_ptr": "*bf16",
    "bias_ptr": "*bf16",
    "residual_ptr": "*bf16",
    "y_ptr": "*bf16",
    "values_ptr": "*fp32",
    "max_ptr": "*fp32",
    "argmax_ptr": "*i32",
    "sum_ptr": "*fp32",
}


def variants(gpu: Gpu, implementation: str, weight_format: str) -> Iterator[Variant]:
    """Every kernel for few tokens that may be launched on this card for this format."""
    for columns in COLUMNS:
        for tiles in possible(weight_format, columns, gpu):
            for fn in (jit.small, jit.small_logits):
                yield variant(gpu, implementation, weight_format, tiles, fn)


def variant(gpu: Gpu, implementation: str, weight_format: str, tiles: Tiles, fn: Any) -> Variant:
    scales = SCALES[weight_format].value
    types = POINTERS | {
        "w_ptr": "*i32",
        # Where there are no scales, the tokens stand in for them.
        "s_ptr": "*i32" if scales == jit.GROUP.value else "*bf16",
        "channel_ptr": "*fp32" if scales == jit.CHANNEL.value else "*bf16",
    }
    launch = options(gpu, tiles)
    constants = _format(weight_format) | tiles.constants() | {"PDL": launch.pop("PDL")}
    signature = {name: types.get(name, "i32") for name in fn.arg_names if name not in constants}
    divisible = (*(name for name in signature if name.endswith("_ptr")), "rows", "k", "stride_x")
    label = f"{fn.__name__} {weight_format} {tuple(vars(tiles).values())}"
    return Variant("dense", implementation, label, fn, signature, constants, launch, divisible, MMA)
