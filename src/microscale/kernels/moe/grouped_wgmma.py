"""Launches of the grouped expert GEMMs on ``wgmma``. ``hardware`` has their tiles.

dispatch → prepare → grouped_gemm (gate and up) → grouped_gemm (down) → combine; up to ``LIST_PAIRS`` pairs the first
two are ``pairs_jit.list_small_batch``. Experts with many tokens take ``grouped_resident_jit``'s kernel for both GEMMs.

Activations meet the weights in bf16, or in E4M3 on the FP8 units, twice as fast. There is no pass that quantises
between the GEMMs: a clamped gate bounds its output, so one power of two serves every token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from microscale.formats import NVFP4
from microscale.hardware import Gpu
from microscale.hardware.tiles.gemm import RESIDENT_REGISTERS, GemmPath, GemmTile, choose
from microscale.kernels import binding
from microscale.kernels.gate import gate_constants
from microscale.kernels.launch import launch
from microscale.kernels.layouts import TILE_K, TILE_ROWS, Packed
from microscale.kernels.moe import grouped_resident_jit as resident
from microscale.kernels.moe import grouped_wgmma_jit as jit
from microscale.kernels.moe.packed import PackedExperts
from microscale.kernels.moe.routing import Dispatch, dispatch
from microscale.kernels.moe.small_batch import (
    combine,
    make_list,
    pdl_constant,
    pdl_option,
)
from microscale.kernels.moe.spec import Gate, GateKind, Routing
from microscale.kernels.numbers import cdiv, next_power_of_2

if TYPE_CHECKING:
    from torch import Tensor

PREPARE_BLOCK = 1024
MMA = r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16"
MMA_FP8 = r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3"
E4M3_MAX = 448.0


# With fewer, the loop over K folds into straight code that Triton 3.6 fails to lower (an asynchronous copy under a
# condition that is false at compile time).
MIN_K_TILES = 4
NARROW_SPILLS = "K of 256 numbers is the embedded model's, whose experts take microseconds; wider ones need none of it"


def gemm_path(bits: int, fp8: bool) -> GemmPath:
    return GemmPath(f"w{bits}a{8 if fp8 else 16}_wgmma")


def tile_constants(tile: GemmTile, path: GemmPath) -> dict[str, Any]:
    if tile.resident(path):
        registers, loader = RESIDENT_REGISTERS[tile.groups]
        sizes = {"BN": tile.block_m, "GROUPS": tile.groups, "STAGES": tile.stages, "BITS": path.weight_bits}
        return sizes | {"REGISTERS": registers, "LOADER_REGISTERS": loader}
    sizes = {"BM": tile.block_n, "BN": tile.block_m, "STAGES": tile.stages, "WARPS": tile.warps}
    return sizes | {"OVERLAP": tile.overlaps(path)}


def gate_scale(gate: Gate) -> float | None:
    """The power of two that takes the gate's output, at most ``limit * (limit + 1)``, into E4M3; None if unbounded."""
    if gate.kind is not GateKind.SWIGLU_CLAMPED:
        return None
    return 2.0 ** math.floor(math.log2(E4M3_MAX / (gate.limit * (gate.limit + 1.0))))


def run(
    packed: PackedExperts,
    gate: Gate,
    x: Tensor,
    routing: Routing,
    gpu: Gpu,
    tile: GemmTile | None = None,
    *,
    fp8: bool = False,
    short_list: bool = False,
) -> Tensor:
    """``x [tokens, hidden]`` bf16 → ``[tokens, hidden]`` bf16. No host synchronisation; sizes follow from shapes.

    ``short_list``: pairs are sorted and tokens prepared in one launch, in the chain of those that overlap; for up to
    ``LIST_PAIRS`` pairs in bf16. Past its last tile that list has an expert of -1 and nothing else, which the resident
    kernel, made for many, does not look at.
    """
    tokens, top_k = routing.expert_ids.shape
    y = torch.empty((tokens, packed.hidden), dtype=torch.bfloat16, device=x.device)
    if not tokens:
        return y
    path = gemm_path(packed.gate_up.format.bits, fp8)
    tile = tile or choose(path, gpu, tokens * top_k, packed.num_experts, packed.hidden)
    padded = packed.gate_up.k_tiles * TILE_K
    if short_list:
        work, values = make_list(x, routing.expert_ids, packed.num_experts, gpu, tile.block_m, padded)
        prepared = PreparedTokens(values, None)
    else:
        work = dispatch(routing.expert_ids, packed.num_experts, tile.block_m)
        prepared = prepare(x, padded, fp8=fp8)
    width = packed.down.k_tiles * TILE_K
    # Columns past the intermediate size meet zero weights: they must be finite, so zero.
    new = torch.empty if width == packed.intermediate else torch.zeros
    h = new((tokens * top_k, width), dtype=prepared.values.dtype, device=x.device)
    parts = torch.empty((tokens * top_k, packed.hidden), dtype=torch.bfloat16, device=x.device)
    _gemm(packed.gate_up, packed.gate_up_bias, gate, prepared, h, work, routing, tile, gpu, first=True)
    second = PreparedTokens(h, prepared.factors)
    _gemm(packed.down, packed.down_bias, gate, second, parts, work, routing, tile, gpu, first=False)
    combine(parts, y, top_k, gpu)
    return y


@dataclass(frozen=True)
class PreparedTokens:
    """Tokens as the GEMMs read them: see ``grouped_wgmma_jit``."""

    values: Tensor  # [tokens, padded] bf16 or float8_e4m3fn
    factors: Tensor | None  # E4M3: [tokens] float32


def prepare(x: Tensor, padded: int, *, fp8: bool = False) -> PreparedTokens:
    """``x`` in fragment order, scaled, with zeros up to ``padded`` columns."""
    tokens, width = x.shape
    if fp8:
        codes = torch.empty((tokens, padded), dtype=torch.uint8, device=x.device)
        factors = torch.empty((tokens,), dtype=torch.float32, device=x.device)
        block = next_power_of_2(padded)
        constants = {"PADDED": padded, "BLOCK": block, "PLAIN": binding.PLAIN}
        arguments = (x, codes, factors, width, x.stride(0))
        launch(jit.prepare_tokens_fp8, (tokens,), arguments, constants, {"num_warps": 4})
        return PreparedTokens(codes.view(torch.float8_e4m3fn), factors)
    out = torch.empty((tokens, padded), dtype=torch.bfloat16, device=x.device)
    grid = (tokens, cdiv(padded, PREPARE_BLOCK))
    constants = {"PADDED": padded, "BLOCK": PREPARE_BLOCK}
    launch(jit.prepare_tokens, grid, (x, out, width, x.stride(0)), constants, {"num_warps": 4})
    return PreparedTokens(out, None)


def _gemm(
    weights: Packed, bias: Tensor | None, gate: Gate, x: PreparedTokens, out: Tensor, work: Dispatch, routing: Routing,
    tile: GemmTile, gpu: Gpu, *, first: bool,
) -> None:  # fmt: skip
    items = work.tiles.shape[0] * cdiv(weights.rows, tile.block_n)
    fp8 = x.factors is not None
    path = gemm_path(weights.format.bits, fp8)
    values = x.values
    pointers = (
        values, values if x.factors is None else x.factors, weights.words, weights.scales,
        weights.scales if weights.peaks is None else weights.peaks, values if bias is None else bias, out,
        work.tiles, work.order, routing.weights,
    )  # fmt: skip
    constants = {
        "KT": weights.k_tiles, "ROW_TILES": weights.rows // TILE_ROWS, "TOP_K": work.top_k, "FP8": fp8, "FIRST": first,
        "NVFP4": weights.format is NVFP4,
        "HAS_BIAS": bias is not None, "H_SCALE": gate_scale(gate) if fp8 else 1.0, "OUT_STRIDE": out.shape[1],
        **gate_constants(gate), **tile_constants(tile, path), **pdl_constant(gpu),
    }  # fmt: skip
    promise = MMA_FP8 if fp8 else MMA
    if tile.resident(path):
        grid = (min(gpu.num_sms, items),)
        options = {"num_warps": 4, **pdl_option(gpu)}
        reason = NARROW_SPILLS if weights.k_tiles == MIN_K_TILES else None
        launch(resident.grouped_gemm_resident, grid, (*pointers, items), constants, options, promise, reason)
    else:
        options = {"num_warps": tile.warps, **pdl_option(gpu)}
        launch(jit.grouped_gemm, (items,), (*pointers, work.offsets), constants, options, promise)
