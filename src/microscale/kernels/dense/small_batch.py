"""Launches of dense layers for small batches. ``hardware`` has their tiles, ``small_batch_jit`` the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from microscale.hardware import Feature, Gpu
from microscale.hardware.tiles.dense import ANY_ROWS_TOKENS, COLUMNS, DenseTile, choose, columns_for
from microscale.hardware.tiles.thresholds import ThresholdName, threshold
from microscale.kernels.dense import from_sum_jit, walk_jit
from microscale.kernels.dense import small_batch_jit as jit
from microscale.kernels.dense.packed import PackedDense
from microscale.kernels.dense.spec import DenseSpec, Logits, Summed
from microscale.kernels.launch import launch, or_unread
from microscale.kernels.layouts import ROW_SCALED, TILE_ROWS
from microscale.kernels.numbers import cdiv, next_power_of_2
from microscale.kernels.op import Reason
from microscale.kernels.small.norms import norm_block, warps

if TYPE_CHECKING:
    from torch import Tensor

MAX_TOKENS = ANY_ROWS_TOKENS
"""Up to which every layer takes this kernel."""
MMA = r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32"
SPILLS = "two words, outside of the loop; with 168 registers nothing spills and 16 tokens take 113 us, not 108"

NORM_COLUMNS = 4096
"""Up to which a program norms the token in front of its layer: 16 columns a thread of ``rms_norm``."""
EARLY_REGISTERS = 168
"""A thread's, from which on it may fetch a second batch of weights meanwhile."""


def why_not_fused_norm(spec: DenseSpec, gpu: Gpu) -> Reason | None:
    """Why sum and norm are not in the layer's own launch."""
    if not spec.behind_sum:
        return "is for layers behind a sum"
    if not gpu.has(Feature.PDL):
        return f"needs programmatic launches, which {gpu.name} does not have"
    if spec.columns > NORM_COLUMNS:
        return f"norms up to {NORM_COLUMNS} columns, not {spec.columns}"
    return None if spec.tokens == 1 else f"norms one token, not {spec.tokens}"


def takes(tokens: int, rows: int, gpu: Gpu) -> bool:
    """Whether this kernel runs this many tokens, and not a GEMM."""
    if tokens <= MAX_TOKENS:
        return True
    programs = cdiv(tokens, COLUMNS[-1]) * cdiv(rows, TILE_ROWS)
    few_rows = programs <= threshold(ThresholdName.FEW_ROWS_PROGRAMS, gpu) * gpu.num_sms
    return few_rows and tokens <= threshold(ThresholdName.FEW_ROWS_TOKENS, gpu)


def passes(weight_format: str, rows: int, tokens: int, gpu: Gpu) -> int:
    """How often the weights are read: from memory, and then from L2."""
    return cdiv(tokens, columns_for(weight_format, rows, tokens, gpu))


def tile_constants(tile: DenseTile) -> dict[str, int]:
    sizes = {"N": tile.columns, "B": tile.row_tiles, "WARPS_N": tile.warps_n}
    return sizes | {"SLICES": tile.slices, "AHEAD": tile.ahead}


@cache
def _scales() -> dict[str, int]:
    group, of_rows = walk_jit.GROUP.value, dict.fromkeys(ROW_SCALED, walk_jit.ROW_SCALES.value)
    return {"bf16": walk_jit.NONE.value, "fp8": walk_jit.CHANNEL.value, "mxfp8": group, "mxfp4": group, **of_rows}


def fetches_early(weight_format: str, tile: DenseTile) -> bool:
    """Whether a program has two batches of weights on their way before it waits for its tokens, and not one. Where it
    norms the token itself, the second is fetched meanwhile. In bf16, and in FP8 (a token of Qwen3.6 takes 45 us less):
    with MXFP4 a step of 120b in ``fast`` takes 25 us more, MXFP8's scales leave no registers (SM 9.0: 14 words spill),
    nor do more than 8 tokens (10 to 47 us more)."""
    return weight_format in ("bf16", "fp8") and tile.columns == COLUMNS[0] and tile.registers >= EARLY_REGISTERS


def norm_constants(packed: PackedDense, tile: DenseTile) -> dict[str, int]:
    """How the warps of a program do the work of a norm's: how many of those at once, and how often."""
    k = packed.k
    norm_warps = warps(norm_block(k))
    held = min(tile.warps, norm_warps)
    chunks = cdiv(k, 256 * held)
    # A block of zeros behind the last chunk: what a slice of K reads past its end.
    sizes = {"CHUNKS": chunks, "BLOCKS": next_power_of_2(chunks + 1)}
    return {**sizes, "HELD": held, "HIGH": norm_warps // held}


def _launch(
    fn: Any,
    packed: PackedDense,
    gpu: Gpu,
    tokens: int,
    arguments: tuple[Any, ...],
    tile: DenseTile,
    further: Mapping[str, int] = MappingProxyType({}),
) -> None:
    pdl, fmt = gpu.has(Feature.PDL), packed.format
    early = {"EARLY": pdl and fetches_early(fmt, tile)}
    constants = {"BITS": packed.bits, "SCALES": _scales()[fmt], **tile_constants(tile), **further, **early, "PDL": pdl}
    options: dict[str, Any] = {"num_warps": tile.warps, "maxnreg": tile.registers}
    if pdl:
        options["launch_pdl"] = True
    grid = (cdiv(tokens, tile.columns), cdiv(packed.rows, tile.rows))
    reason = SPILLS if fmt == "mxfp4" and tile.row_tiles == 2 * tile.warps_n and tile.registers < 168 else None
    launch(fn, grid, arguments, constants, options, MMA, reason)


def run(packed: PackedDense, gpu: Gpu, x: Tensor, residual: Tensor | None, tile: DenseTile | None = None) -> Tensor:
    """``x [tokens, k]`` bf16 → bf16 ``[tokens, rows]``. No host synchronisation; sizes follow from shapes."""
    tokens = x.shape[0]
    y = torch.empty((tokens, packed.rows), dtype=torch.bfloat16, device=x.device)
    if not tokens:
        return y
    tile = tile or choose(packed.format, packed.rows, tokens, gpu)
    arguments = (
        *_inputs(packed, x), or_unread(residual, x), y,
        tokens, packed.rows, packed.k, x.stride(0), packed.rows if residual is None else residual.stride(0),
        int(packed.bias is not None), int(residual is not None),
    )  # fmt: skip
    _launch(jit.small_batch, packed, gpu, tokens, arguments, tile)
    return y


def run_from_sum(packed: PackedDense, gpu: Gpu, summed: Summed, tile: DenseTile | None = None) -> tuple[Tensor, Tensor]:
    """One token: the layer of the norm of a sum, bf16 ``[1, rows]``, and the sum, in one launch."""
    x = summed.x
    y = torch.empty((1, packed.rows), dtype=torch.bfloat16, device=x.device)
    total = torch.empty((1, packed.k), dtype=torch.bfloat16, device=x.device)
    tile = tile or choose(packed.format, packed.rows, 1, gpu)
    weights = _inputs(packed, x)[1:]
    arguments = (
        x, summed.residual, summed.weight, *weights, total, y, summed.epsilon, packed.rows, packed.k,
        int(packed.bias is not None),
    )  # fmt: skip
    _launch(from_sum_jit.small_batch_from_sum, packed, gpu, 1, arguments, tile, norm_constants(packed, tile))
    return y, total


def run_logits(
    packed: PackedDense, gpu: Gpu, x: Tensor, softcap: float | None = None, tile: DenseTile | None = None
) -> Logits:
    """``x [tokens, k]`` bf16 → float32 logits, capped if so wished, with their blocks, in one launch."""
    tokens = x.shape[0]
    tile = tile or choose(packed.format, packed.rows, tokens, gpu)
    out = empty_logits(tokens, packed.rows, tile.rows, x.device)
    if tokens:
        arguments = (
            *_inputs(packed, x),
            out.values, out.block_max, out.block_argmax, out.block_sum,
            tokens, packed.rows, packed.k, x.stride(0), int(packed.bias is not None), softcap or 0.0,
        )  # fmt: skip
        _launch(jit.small_batch_logits, packed, gpu, tokens, arguments, tile)
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
    scales = (or_unread(packed.groups, x), or_unread(packed.channels, x), or_unread(packed.bias, x))
    return x, packed.weight.view(torch.int32), *scales  # bf16 weights are read as words of two
