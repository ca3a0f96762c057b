"""Launches of dense layers for batches: 8-bit and 4-bit weights in fragments. ``gemm_jit`` has the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from microscale.hardware import Feature, Gpu
from microscale.hardware.tiles import GemmPath, Tile, choose, possible
from microscale.kernels.dense import gemm_jit as jit
from microscale.kernels.dense.packed import PackedDense
from microscale.kernels.dense.small import POINTERS, empty_logits
from microscale.kernels.dense.spec import Logits
from microscale.kernels.moe.grouped import MMA, quantise
from microscale.kernels.numbers import cdiv
from microscale.kernels.op import Variant

MAX_ACCUMULATORS = 64
LOGIT_TOKENS = 64
"""Tokens of the largest tile that also summarises logits: with 128 that spills on SM100 (72 to 88 bytes)."""
EFFICIENCY = 0.4
"""Of the floor's speed: an assumption, after the grouped expert GEMM that decodes in the same way."""


@dataclass(frozen=True)
class Launch:
    """All that one launch has besides its outputs."""

    grid: tuple[int]
    inputs: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    keywords: dict[str, Any]
    block_rows: int


def slim(tile: Tile) -> Tile:
    """The tile with at most 64 accumulators a thread: with 128 the epilogue (residual, or the blocks of logits) spills
    48 to 464 bytes on SM90, where the experts' grouped GEMM just fits."""
    return replace(tile, block_m=tile.block_m // 2) if tile.accumulators() > MAX_ACCUMULATORS else tile


def tile_for(path: GemmPath, gpu: Gpu, tokens: int, rows: int, logits: bool) -> Tile:
    """The tile of a launch; ``variants`` lists every one."""
    return slim(choose(path, gpu, min(tokens, LOGIT_TOKENS) if logits else tokens, 1, rows).tile)


def path_of(bits: int, block_scaled: bool) -> GemmPath:
    return GemmPath(f"w{bits}a{8 if block_scaled else 16}")


def run(
    packed: PackedDense,
    gpu: Gpu,
    x: Tensor,
    residual: Tensor | None,
    *,
    block_scaled: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """``x [tokens, k]`` bf16 → bf16 ``[tokens, rows]``. ``block_scaled``: activations in MXFP8 inside."""
    tokens = x.shape[0]
    y = torch.empty((tokens, packed.rows), dtype=torch.bfloat16, device=x.device)
    if not tokens:
        return y
    tile = tile or tile_for(path_of(packed.bits, block_scaled), gpu, tokens, packed.rows, logits=False)
    launch = _prepare(packed, gpu, x, block_scaled, tile)
    stride = packed.rows if residual is None else residual.stride(0)
    jit.gemm[launch.grid](
        *launch.inputs, x if residual is None else residual, y, *launch.sizes[:4], stride, launch.sizes[4],
        int(residual is not None), **launch.keywords,
    )  # fmt: skip
    return y


def run_logits(
    packed: PackedDense, gpu: Gpu, x: Tensor, *, block_scaled: bool = False, tile: Tile | None = None
) -> Logits:
    """``x [tokens, k]`` bf16 → float32 logits with their blocks."""
    tokens = x.shape[0]
    if not tokens:
        return empty_logits(0, packed.rows, 128, x.device)
    tile = tile or tile_for(path_of(packed.bits, block_scaled), gpu, tokens, packed.rows, logits=True)
    launch = _prepare(packed, gpu, x, block_scaled, tile)
    out = empty_logits(tokens, packed.rows, launch.block_rows, x.device)
    jit.gemm_logits[launch.grid](
        *launch.inputs, out.values, out.block_max, out.block_argmax, out.block_sum, *launch.sizes, **launch.keywords
    )
    return out


def _prepare(packed: PackedDense, gpu: Gpu, x: Tensor, block_scaled: bool, tile: Tile) -> Launch:
    tokens = x.shape[0]
    path = path_of(packed.bits, block_scaled)
    values, scales = x, x
    if block_scaled:
        quantised = quantise(x)
        values, scales = quantised.values, quantised.scale_words
    inputs = (values, scales, packed.weight, _or(packed.groups, x), _or(packed.channels, x), _or(packed.bias, x))
    sizes = (tokens, packed.rows, packed.k, values.stride(0), int(packed.bias is not None))
    plain = bool(triton.knobs.runtime.interpret)
    keywords = _constants(gpu, path, tile, packed.channels is not None) | {"PLAIN": plain} | _options(gpu, path, tile)
    grid = (cdiv(packed.rows, tile.block_n) * cdiv(tokens, tile.block_m),)
    return Launch(grid, inputs, sizes, keywords, tile.block_n)


def _constants(gpu: Gpu, path: GemmPath, tile: Tile, channels: bool) -> dict[str, Any]:
    return {
        "BITS": path.weight_bits,
        "CHANNELS": channels,
        "MX": path.block_scaled,
        "PLAIN": False,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "PART_M": tile.part_m(gpu.family),
        "QUADS": not (gpu.has(Feature.WGMMA) or gpu.has(Feature.TCGEN05)),
        "STAGES": tile.stages,
    }


def _options(gpu: Gpu, path: GemmPath, tile: Tile) -> dict[str, Any]:
    # Left alone, ptxas aims at one more program an SM and spills (see moe/grouped).
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": 255}
    if path.block_scaled and gpu.family.triton_arch is not None:
        options["arch"] = gpu.family.triton_arch
    return options


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer that the kernel does not follow stands in for a tensor that is not there."""
    return other if tensor is None else tensor


def variants(gpu: Gpu, implementation: str, weight_format: str, block_scaled: bool) -> Iterator[Variant]:
    """Every kernel for batches of one format that may be launched on this card."""
    path = path_of(4 if weight_format == "mxfp4" else 8, block_scaled)
    for tile in dict.fromkeys(slim(tile) for tile in possible(path, gpu)):
        yield _variant(gpu, implementation, weight_format, path, tile, jit.gemm)
        if tile.block_m <= LOGIT_TOKENS:
            yield _variant(gpu, implementation, weight_format, path, tile, jit.gemm_logits)


def _variant(gpu: Gpu, implementation: str, weight_format: str, path: GemmPath, tile: Tile, fn: Any) -> Variant:
    channels = weight_format == "fp8"
    types = POINTERS | {
        "x_ptr": "*u8" if path.block_scaled else "*bf16",
        "xs_ptr": "*i32" if path.block_scaled else "*bf16",
        "words_ptr": "*i32",
        # What is not there, the tokens stand in for.
        "scales_ptr": "*bf16" if channels else "*i32",
        "channels_ptr": "*fp32" if channels else "*bf16",
    }
    constants = _constants(gpu, path, tile, channels)
    signature = {name: types.get(name, "i32") for name in fn.arg_names if name not in constants}
    divisible = (*(name for name in signature if name.endswith("_ptr")), "rows", "k", "stride_x")
    promise = next((text for feature, text in MMA.items() if gpu.has(feature)), None) if path.block_scaled else None
    name = f"{fn.__name__} {weight_format} {path} {tile.block_m}x{tile.block_n}x{tile.block_k} {tile.stages} stages"
    options = _options(gpu, path, tile)
    return Variant("dense", implementation, name, fn, signature, constants, options, divisible, promise)
