"""Launches of dense layers for batches: 8-bit and 4-bit weights in fragments. ``gemm_jit`` has the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from microscale.formats import NVFP4
from microscale.hardware import Gpu
from microscale.hardware.tiles.gemm import GemmPath, GemmTile, dense_tile
from microscale.kernels.dense import gemm_jit as jit
from microscale.kernels.dense.packed import PackedDense
from microscale.kernels.dense.small_batch import empty_logits
from microscale.kernels.dense.spec import Logits
from microscale.kernels.launch import launch, or_unread
from microscale.kernels.layouts import ROW_SCALED
from microscale.kernels.moe.grouped import gemm_constants, gemm_options, gemm_path, mma_promise, quantise
from microscale.kernels.numbers import cdiv

if TYPE_CHECKING:
    from torch import Tensor

EFFICIENCY = 0.4
"""Of the floor's speed: an assumption, after the grouped expert GEMM that decodes in the same way."""


@dataclass(frozen=True)
class _GemmLaunch:
    """All that one launch has apart from its outputs."""

    grid: tuple[int]
    inputs: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    constants: dict[str, Any]
    options: dict[str, Any]
    promise: str | None


def run(
    packed: PackedDense,
    gpu: Gpu,
    x: Tensor,
    residual: Tensor | None,
    *,
    block_scaled: bool = False,
    tile: GemmTile | None = None,
) -> Tensor:
    """``x [tokens, k]`` bf16 → bf16 ``[tokens, rows]``. ``block_scaled``: activations in MXFP8 inside, in NVFP4
    where weights are."""
    tokens = x.shape[0]
    y = torch.empty((tokens, packed.rows), dtype=torch.bfloat16, device=x.device)
    if not tokens:
        return y
    tile = tile or dense_tile(_path(packed, block_scaled), gpu, tokens, packed.rows, logits=False)
    started = _prepare(packed, gpu, x, block_scaled, tile)
    stride = packed.rows if residual is None else residual.stride(0)
    arguments = (
        *started.inputs, x if residual is None else residual, y, *started.sizes[:4], stride, started.sizes[4],
        int(residual is not None),
    )  # fmt: skip
    launch(jit.gemm, started.grid, arguments, started.constants, started.options, started.promise)
    return y


def run_logits(
    packed: PackedDense, gpu: Gpu, x: Tensor, *, block_scaled: bool = False, tile: GemmTile | None = None
) -> Logits:
    """``x [tokens, k]`` bf16 → float32 logits with their blocks."""
    tokens = x.shape[0]
    if not tokens:
        return empty_logits(0, packed.rows, 128, x.device)
    tile = tile or dense_tile(_path(packed, block_scaled), gpu, tokens, packed.rows, logits=True)
    started = _prepare(packed, gpu, x, block_scaled, tile)
    out = empty_logits(tokens, packed.rows, tile.block_n, x.device)
    blocks = (out.values, out.block_max, out.block_argmax, out.block_sum)
    arguments = (*started.inputs, *blocks, *started.sizes)
    launch(jit.gemm_logits, started.grid, arguments, started.constants, started.options, started.promise)
    return out


def _path(packed: PackedDense, block_scaled: bool) -> GemmPath:
    return gemm_path(packed.bits, block_scaled, packed.format == NVFP4.name)


def _prepare(packed: PackedDense, gpu: Gpu, x: Tensor, block_scaled: bool, tile: GemmTile) -> _GemmLaunch:
    tokens = x.shape[0]
    path = _path(packed, block_scaled)
    values, scales = x, x
    if block_scaled:
        quantised = quantise(x, path)
        values, scales = quantised.values, quantised.scale_words
    inputs = (
        values,
        scales,
        packed.weight,
        or_unread(packed.groups, x),
        or_unread(packed.channels, x),
        or_unread(packed.bias, x),
    )
    sizes = (tokens, packed.rows, packed.k, values.stride(0), int(packed.bias is not None))
    constants = gemm_constants(gpu, path, tile) | {
        "CHANNELS": packed.channels is not None,
        "ROW_SCALES": packed.format in ROW_SCALED,
    }
    grid = (cdiv(packed.rows, tile.block_n) * cdiv(tokens, tile.block_m),)
    return _GemmLaunch(grid, inputs, sizes, constants, gemm_options(gpu, path, tile), mma_promise(gpu, path))
