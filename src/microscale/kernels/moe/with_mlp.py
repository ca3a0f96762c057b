"""Launches of an expert layer with a dense MLP beside it, both in two kernels: ``with_mlp_jit`` has the arithmetic.

On streams of their own the two fill the card 1.5 times, the MLP's three kernels wait for each other, and programmatic
dependent launch ends where streams part and meet. In one launch they are one wave, and nothing is in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from microscale.errors import Unsupported
from microscale.hardware import Gpu
from microscale.hardware.tiles.experts import ExpertGemm, Tile, with_mlp_slices
from microscale.hardware.tiles.experts import with_mlp as tile_for
from microscale.kernels.dense.packed import PackedDense
from microscale.kernels.launch import launch
from microscale.kernels.layouts import TILE_K, TILE_ROWS
from microscale.kernels.moe import with_mlp_jit as jit
from microscale.kernels.moe.packed import PackedExperts
from microscale.kernels.moe.small_batch import (
    DIRECT_TOKENS,
    MMA,
    gate_constants,
    gemm_options,
    pdl_constant,
)
from microscale.kernels.moe.spec import Gate, Routing
from microscale.kernels.numbers import cdiv, next_power_of_2

MAX_TOKENS = DIRECT_TOKENS
RUN = 8
"""Gate rows of the MLP that stand before as many up rows: half of a row tile."""


def serves(packed: PackedExperts, mlp: tuple[PackedDense, PackedDense], routing: Routing, gpu: Gpu) -> bool:
    """Where tiles were measured, with registers for one wave; elsewhere the MLP runs beside the experts."""
    gate_up, down = mlp
    tokens, top_k = routing.expert_ids.shape
    fits = gate_up.k == packed.hidden == down.rows and gate_up.rows == 2 * down.k and down.k % RUN == 0
    formats = {gate_up.format, down.format, packed.gate_up.format.name}
    biases = (gate_up.bias, down.bias, packed.gate_up_bias, packed.down_bias)
    slices = with_mlp_slices(gpu)
    few = bool(slices) and 0 < tokens <= MAX_TOKENS
    # Slices of K of which only the last may be short: those of gate_up, and those of the MLP's down.
    whole = all(_whole(gate_up.k, each) for each in slices) and _whole(down.k, _warps(top_k) // 2)
    return few and whole and fits and formats == {"mxfp8"} and all(bias is None for bias in biases)


def _steps(k: int, slices: int) -> int:
    """Tiles of K of a slice."""
    return cdiv(cdiv(k, TILE_K), slices)


def _whole(k: int, slices: int) -> bool:
    return (slices - 1) * _steps(k, slices) < _steps(k, 1)


def _warps(top_k: int) -> int:
    """Of a program of ``down``: one for each expert, and at least two for the MLP's two row tiles."""
    return max(2, next_power_of_2(top_k))


def run(
    packed: PackedExperts, mlp: tuple[PackedDense, PackedDense], gate: Gate, x: Tensor, routing: Routing, gpu: Gpu
) -> Tensor:
    """``x [2, tokens, hidden]`` bf16, for the MLP and for the experts → the answers of both, likewise."""
    tokens, top_k = routing.expert_ids.shape
    gate_up, down = mlp
    x = x.contiguous()
    rows = tokens * top_k + _warps(top_k) - top_k  # with those that are read and not used
    h = torch.empty((rows, packed.intermediate), dtype=torch.bfloat16, device=x.device)
    mlp_h = torch.empty((tokens, down.k), dtype=torch.bfloat16, device=x.device)
    y = torch.empty_like(x)
    first, options = _first(
        packed.gate_up.k, packed.gate_up.rows, gate_up.rows, tokens, top_k, gate_constants(gate), gpu
    )
    arguments: tuple[Any, ...] = (
        x, packed.gate_up.words, packed.gate_up.scales, gate_up.weight, gate_up.groups, h, mlp_h, routing.expert_ids,
        tokens,
    )  # fmt: skip
    grid = (first["MLP_TILES"] + tokens * top_k * first["ROW_TILES"],)
    launch(jit.gate_up_with_mlp, grid, arguments, first, options, MMA)
    second, options = _second(packed.down.k, packed.down.rows, down.k, tokens, top_k, gpu)
    arguments = (
        h, mlp_h, packed.down.words, packed.down.scales, down.weight, down.groups, y, routing.expert_ids,
        routing.weights, tokens,
    )  # fmt: skip
    grid = (cdiv(second["ROW_TILES"], 2) + tokens * second["ROW_TILES"],)
    launch(jit.down_with_mlp, grid, arguments, second, options, MMA)
    return y


def _tile(gemm: ExpertGemm, tokens: int, top_k: int, row_tiles: int, gpu: Gpu) -> Tile:
    tile = tile_for(gemm, tokens, top_k, row_tiles, gpu)
    if tile is None:
        raise Unsupported(f"No tile of {gemm} was measured on the family of {gpu.name} for {tokens} tokens.")
    return tile


_Settings = tuple[dict[str, Any], dict[str, Any]]
"""Constants and options."""


def _first(k: int, rows: int, mlp_rows: int, tokens: int, top_k: int, gate: dict[str, Any], gpu: Gpu) -> _Settings:
    """Constants and options of ``gate_up_with_mlp``."""
    row_tiles, mlp_tiles = rows // TILE_ROWS, mlp_rows // TILE_ROWS
    tile = _tile(ExpertGemm.GATE_UP_WITH_MLP, tokens, top_k, tokens * top_k * row_tiles + mlp_tiles, gpu)
    sizes = {"K": k, "ROW_TILES": row_tiles, "MLP_TILES": mlp_tiles, "TOP_K": top_k, "BITS": 8}
    walk = {"SLICES": tile.slices, "AHEAD": min(tile.ahead, _steps(k, tile.slices))}
    return sizes | gate | walk | pdl_constant(gpu), gemm_options(tile, tile.warps, gpu)


def _second(k: int, rows: int, mlp_k: int, tokens: int, top_k: int, gpu: Gpu) -> _Settings:
    """Constants and options of ``down_with_mlp``."""
    experts, row_tiles = _warps(top_k), rows // TILE_ROWS
    tile = _tile(ExpertGemm.DOWN_WITH_MLP, tokens, top_k, tokens * top_k * row_tiles, gpu)
    sizes = {"K": k, "MLP_K": mlp_k, "ROW_TILES": row_tiles, "TOP_K": top_k, "EXPERTS": experts, "BITS": 8}
    options = gemm_options(tile, experts, gpu)
    ahead = {"AHEAD": min(tile.ahead, _steps(k, 1)), "MLP_AHEAD": min(tile.ahead, _steps(mlp_k, experts // 2))}
    return sizes | ahead | pdl_constant(gpu), options
