"""Launches of an expert layer with a dense MLP, both in two kernels: ``with_mlp_jit`` has the arithmetic.

On streams of their own the two fill the card 1.5 times, the MLP's three kernels wait for each other, and programmatic
dependent launch ends where streams part and meet. In one launch they are one wave, and nothing is in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from microscale.errors import Unsupported
from microscale.formats import MXFP8
from microscale.hardware import Gpu
from microscale.hardware.tiles.experts import ExpertGemm, ExpertTile, with_mlp_slices
from microscale.hardware.tiles.experts import with_mlp as tile_for
from microscale.kernels.gate import gate_constants
from microscale.kernels.launch import launch
from microscale.kernels.layouts import TILE_K, TILE_ROWS
from microscale.kernels.moe import with_mlp_jit as jit
from microscale.kernels.moe.packed import PackedExperts
from microscale.kernels.moe.small_batch import (
    DIRECT_TOKENS,
    MMA,
    gemm_options,
    pdl_constant,
)
from microscale.kernels.moe.spec import Mlp, MlpPath, MlpSpec, MoeSpec, Routing
from microscale.kernels.numbers import cdiv, next_power_of_2
from microscale.kernels.op import Reason

if TYPE_CHECKING:
    from torch import Tensor

MAX_TOKENS = DIRECT_TOKENS
RUN = 8
"""Gate rows of the MLP that come before as many up rows: half of a row tile."""


def supports(spec: MoeSpec, gpu: Gpu) -> Reason | None:
    """Where tiles were measured, with registers for one wave; elsewhere the MLP runs next to the experts."""
    measured = with_mlp_slices(gpu)
    if not measured:
        return f"has tiles where they were measured, and none for {gpu.name}"
    if not 0 < spec.tokens <= MAX_TOKENS:
        return f"runs up to {MAX_TOKENS} tokens with an MLP, not {spec.tokens}"
    if spec.weight_format != MXFP8.name or spec.bias:
        return f"takes an MLP with mxfp8 experts without biases, not with {spec.weight_format}"
    # Slices of K of which only the last may be short: those of gate_up, and those of the MLP's down.
    if not all(_whole(spec.hidden, slices) for slices in measured):
        return f"cuts K into slices, for which {spec.hidden} columns are too few"
    return None if spec.mlp is None else _mlp_reason(spec.mlp, spec.top_k)


def _mlp_reason(mlp: MlpSpec, top_k: int) -> Reason | None:
    if mlp.weight_format != MXFP8.name or mlp.bias or not mlp.packed:
        held = "" if mlp.packed else ", held unpacked"
        return f"takes an mxfp8 MLP without biases, not {mlp.weight_format}{' with' if mlp.bias else ''}{held}"
    if mlp.units % RUN or not _whole(mlp.units, _warps(top_k) // 2):
        return f"takes units in runs of {RUN} that fill its slices of K, not {mlp.units}"
    return None


def _steps(k: int, slices: int) -> int:
    """Tiles of K of a slice."""
    return cdiv(cdiv(k, TILE_K), slices)


def _whole(k: int, slices: int) -> bool:
    return (slices - 1) * _steps(k, slices) < _steps(k, 1)


def _warps(top_k: int) -> int:
    """Of a program of ``down``: one for each expert, and at least two for the MLP's two row tiles."""
    return max(2, next_power_of_2(top_k))


def run(packed: PackedExperts, mlp: Mlp, spec: MoeSpec, gpu: Gpu, x: Tensor, routing: Routing) -> Tensor:
    """``x [2, tokens, hidden]`` bf16, for the MLP and for the experts → the answers of both, likewise."""
    tokens, top_k = routing.expert_ids.shape
    gate_up, down = mlp.gate_up, mlp.down
    x = x.contiguous()
    rows = tokens * top_k + _warps(top_k) - top_k  # with those that are read and not used
    h = torch.empty((rows, packed.intermediate), dtype=torch.bfloat16, device=x.device)
    mlp_h = torch.empty((tokens, down.k), dtype=torch.bfloat16, device=x.device)
    y = x.new_empty(x.shape)
    first, options = _first(
        packed.gate_up.k, packed.gate_up.rows, gate_up.rows, tokens, top_k, gate_constants(spec.gate), gpu
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


def _tile(gemm: ExpertGemm, tokens: int, top_k: int, row_tiles: int, gpu: Gpu) -> ExpertTile:
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


PATH = MlpPath("with the experts", "one wave of programs does both", supports, run)
