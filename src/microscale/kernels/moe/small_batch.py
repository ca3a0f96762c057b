"""Launches of the small-batch expert layer. ``hardware`` has their tiles.

direct (1 or 2 tokens):   gate_up_small → down_direct
own list (up to 8):       gate_up_small → down_small → combine, or the norm that follows
list (up to 64):          list_small_batch → gate_up_small → down_small → combine, or the norm that follows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from microscale.errors import Unsupported
from microscale.formats import FP8_BLOCK
from microscale.hardware import Feature, Gpu
from microscale.hardware.tiles.experts import (
    ExpertGemm,
    ExpertShape,
    ExpertTile,
    direct_down,
    direct_gate_up,
    for_list,
    for_own_list,
    max_registers,
)
from microscale.kernels.gate import gate_constants
from microscale.kernels.launch import launch, or_unread
from microscale.kernels.layouts import ROW_SCALED, TILE_K, TILE_ROWS, Packed
from microscale.kernels.moe import pairs_jit
from microscale.kernels.moe import small_batch_jit as jit
from microscale.kernels.moe.packed import PackedExperts
from microscale.kernels.moe.routing import Dispatch, tile_bound
from microscale.kernels.moe.spec import Gate, MoeSpec, Parts, Routing
from microscale.kernels.numbers import cdiv, next_power_of_2

if TYPE_CHECKING:
    from torch import Tensor

MAX_TOKENS = 64
MAX_TOP_K = 16
LIST_PAIRS = 2048
"""Most that ``make_list`` sorts; each of its programs looks at all of them. 2,048 pairs, a layer with ``dispatch`` and
with the list: 32 experts 313 and 299 us, 128 555 and 548, 256 narrow ones 159 and 155 (H200)."""
DIRECT_TOKENS = 2
COLUMNS = 8
"""Tokens that one program of the list serves: the columns of m16n8k16."""
OWN_LIST_TOKENS = COLUMNS
"""So few that an expert has one tile."""
OWN_LIST_TOP_K = 15
"""A slot of a token and whether there is one are 4 bits."""
COMBINE_BLOCK = 1024
LIST_WARPS = 4
MMA = r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32"


def shape_of(weights: Packed) -> ExpertShape:
    """What the choice of tiles depends on."""
    rest = {"half_tile": weights.k % TILE_K > 0, "factors": weights.format is FP8_BLOCK}
    return ExpertShape(weights.rows // TILE_ROWS, weights.k_tiles, weights.format.bits, weights.num_experts, **rest)


def weight_constants(weights: Packed) -> dict[str, Any]:
    sizes = {"K": weights.k, "ROW_TILES": weights.rows // TILE_ROWS}
    return {**sizes, "BITS": weights.format.bits, "ROW_SCALES": weights.format.name in ROW_SCALED}


def tile_constants(tile: ExpertTile) -> dict[str, int]:
    return {"B": tile.row_tiles, "WARPS_N": tile.warps_n, "SLICES": tile.slices, "AHEAD": tile.ahead}


def pdl_constant(gpu: Gpu) -> dict[str, bool]:
    """Whether a kernel takes part in programmatic dependent launch: the constant that it reads."""
    return {"PDL": gpu.has(Feature.PDL)}


def pdl_option(gpu: Gpu) -> dict[str, bool]:
    """The same as an option of its launch."""
    return {"launch_pdl": True} if gpu.has(Feature.PDL) else {}


def gemm_options(tile: ExpertTile, warps: int, gpu: Gpu) -> dict[str, Any]:
    """Launch options of a GEMM with this many warps in a program."""
    registers = max_registers(tile, warps, gpu)
    limit = {} if registers is None else {"maxnreg": registers}
    return {"num_warps": warps, **pdl_option(gpu), **limit}


def run_direct(packed: PackedExperts, spec: MoeSpec, gpu: Gpu, x: Tensor, routing: Routing) -> Tensor:
    """``x [tokens, hidden]`` bf16 → ``[tokens, hidden]`` bf16. Each token reads its own experts."""
    tokens, top_k = routing.expert_ids.shape
    y = _answer(packed, x)
    if not tokens:
        return y
    h = _room(packed, x, tokens, top_k)
    gate_up, down = shape_of(packed.gate_up), shape_of(packed.down)
    tile = direct_gate_up(gate_up, tokens, top_k, gpu)
    _gate_up(packed, spec.gate, x, h, routing.expert_ids, None, gpu, tile)
    _down_direct(packed, h, routing, y, gpu, direct_down(down, tokens, top_k, gpu))
    return y


@dataclass(frozen=True)
class OwnList:
    """A work list that is never written: every program finds its tile from the experts' ids."""

    tiles: int
    """At most."""
    expert_words: int
    """Words of 32 bits with a bit for each expert: a power of two, so that layers share kernels."""


def run_own_list(packed: PackedExperts, spec: MoeSpec, gpu: Gpu, x: Tensor, routing: Routing) -> Tensor:
    """The same as ``run_list``, to the bit, of at most ``OWN_LIST_TOKENS`` tokens: one launch less."""
    y = _answer(packed, x)
    if x.shape[0]:
        parts = run_own_list_parts(packed, spec, gpu, x, routing)
        combine(parts.rows, y, parts.top_k, gpu)
    return y


def run_list(packed: PackedExperts, spec: MoeSpec, gpu: Gpu, x: Tensor, routing: Routing) -> Tensor:
    """``x [tokens, hidden]`` bf16 → ``[tokens, hidden]`` bf16. Tokens of one expert share its weights."""
    y = _answer(packed, x)
    if x.shape[0]:
        parts = run_list_parts(packed, spec, gpu, x, routing)
        combine(parts.rows, y, parts.top_k, gpu)
    return y


def run_own_list_parts(packed: PackedExperts, spec: MoeSpec, gpu: Gpu, x: Tensor, routing: Routing) -> Parts:
    """As ``run_list_parts``, to the bit, of at most ``OWN_LIST_TOKENS`` tokens."""
    work, x = own_list(x, routing.expert_ids, packed.num_experts, gpu)
    return _parts(packed, spec, gpu, x, routing, work, for_own_list)


def run_list_parts(packed: PackedExperts, spec: MoeSpec, gpu: Gpu, x: Tensor, routing: Routing) -> Parts:
    """``x [tokens, hidden]`` bf16, at least one token → what each of its experts answers."""
    work, scaled = make_list(x, routing.expert_ids, packed.num_experts, gpu)
    return _parts(packed, spec, gpu, scaled, routing, work, for_list)


def _parts(
    packed: PackedExperts,
    spec: MoeSpec,
    gpu: Gpu,
    x: Tensor,
    routing: Routing,
    work: Dispatch | OwnList,
    tile: Callable[[ExpertGemm, ExpertShape, int, int, Gpu], ExpertTile],
) -> Parts:
    """Both GEMMs. ``x``: as ``work`` wants it."""
    tokens, top_k = routing.expert_ids.shape
    h = _room(packed, x, tokens, top_k)
    gate_up, down = shape_of(packed.gate_up), shape_of(packed.down)
    parts = torch.empty((tokens * top_k, packed.hidden), dtype=torch.float32, device=x.device)
    first = tile(ExpertGemm.GATE_UP_LIST, gate_up, tokens, top_k, gpu)
    _gate_up(packed, spec.gate, x, h, routing.expert_ids, work, gpu, first)
    _down(packed, h, routing, work, parts, gpu, tile(ExpertGemm.DOWN_LIST, down, tokens, top_k, gpu))
    return Parts(parts, top_k)


def _answer(packed: PackedExperts, x: Tensor) -> Tensor:
    return torch.empty((x.shape[0], packed.hidden), dtype=torch.bfloat16, device=x.device)


def _room(packed: PackedExperts, x: Tensor, tokens: int, top_k: int) -> Tensor:
    """For the gate's output. No host synchronisation; sizes follow from shapes."""
    # down_direct reads, and does not use, rows up to a power of two.
    rows = tokens * top_k + next_power_of_2(top_k) - top_k
    return torch.empty((rows, packed.intermediate), dtype=torch.bfloat16, device=x.device)


def own_list(x: Tensor, ids: Tensor, num_experts: int, gpu: Gpu) -> tuple[OwnList, Tensor]:
    """In place of ``make_list``. ``x`` stays as it is: ``gate_up`` scales it."""
    if ids.shape[0] > OWN_LIST_TOKENS or ids.shape[1] > OWN_LIST_TOP_K:
        most = f"up to {OWN_LIST_TOKENS} tokens with {OWN_LIST_TOP_K} experts each"
        raise Unsupported(f"Programs find their tiles for {most}, not for ids {list(ids.shape)}.")
    return OwnList(tile_bound(ids.numel(), num_experts, COLUMNS), next_power_of_2(cdiv(num_experts, 32))), x


def make_list(
    x: Tensor, ids: Tensor, num_experts: int, gpu: Gpu, columns: int = COLUMNS, padded: int = 0
) -> tuple[Dispatch, Tensor]:
    """The work list of at most ``LIST_PAIRS`` pairs, in tiles of ``columns``, and ``x`` times 2**64.

    ``padded``: tokens in the order, and with as many columns, as ``grouped_wgmma`` wants them.
    """
    tokens, top_k = ids.shape
    bound = tile_bound(ids.numel(), num_experts, columns)
    order = torch.empty(ids.numel(), dtype=torch.int32, device=x.device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=x.device)
    tiles = torch.empty((bound, 4), dtype=torch.int32, device=x.device)
    scaled = torch.empty((tokens, padded or x.shape[1]), dtype=torch.bfloat16, device=x.device)
    arguments = (ids, offsets, tiles, order, x, scaled, ids.numel(), bound, num_experts, x.shape[1], x.stride(0))
    constants = list_constants(ids.numel(), num_experts, gpu, columns, padded)
    # Left alone, ptxas stops at 80 registers and spills four words of 2,048 pairs (SM 9.0, Triton 3.7.1).
    options = {"num_warps": LIST_WARPS, "maxnreg": 128, **pdl_option(gpu)}
    launch(pairs_jit.list_small_batch, (num_experts + tokens,), arguments, constants, options)
    return Dispatch(offsets, order, tiles, columns, top_k), scaled


def list_constants(pairs: int, num_experts: int, gpu: Gpu, columns: int = COLUMNS, padded: int = 0) -> dict[str, Any]:
    sizes = {"PAIRS": max(32, next_power_of_2(pairs)), "EXPERTS": max(32, next_power_of_2(num_experts))}
    return {**sizes, "COLUMNS": columns, "PADDED": padded, "BLOCK": 1024, **pdl_constant(gpu)}


@dataclass(frozen=True)
class _Named:
    """How the programs of a GEMM learn what they do."""

    tiles: Tensor
    order: Tensor
    entries: int
    expert_words: int = 0

    @classmethod
    def by(cls, work: Dispatch | OwnList | None, ids: Tensor) -> _Named:
        """By a list, by the ids of all tokens, or by one id."""
        if isinstance(work, Dispatch):
            return cls(work.tiles, work.order, work.tiles.shape[0])
        return cls(ids, ids, ids.numel()) if work is None else cls(ids, ids, work.tiles, work.expert_words)


def _gate_up(
    packed: PackedExperts, gate: Gate, x: Tensor, h: Tensor, ids: Tensor, work: Dispatch | OwnList | None, gpu: Gpu,
    tile: ExpertTile,
) -> None:  # fmt: skip
    weights, named = packed.gate_up, _Named.by(work, ids)
    blocks = cdiv(weights.rows // TILE_ROWS, tile.row_tiles)
    arguments = (
        x, weights.words, weights.scales, or_unread(packed.gate_up_bias, x), h, named.tiles, named.order, x.stride(0),
        x.shape[0],
    )  # fmt: skip
    constants = {
        **weight_constants(weights), "TOP_K": ids.shape[1], "DIRECT": work is None,
        "EXPERT_WORDS": named.expert_words, "HAS_BIAS": packed.gate_up_bias is not None,
        **gate_constants(gate), **tile_constants(tile), **pdl_constant(gpu),
    }  # fmt: skip
    options = gemm_options(tile, tile.warps, gpu)
    launch(jit.gate_up_small, (named.entries * blocks,), arguments, constants, options, MMA)


def _down(
    packed: PackedExperts,
    h: Tensor,
    routing: Routing,
    work: Dispatch | OwnList,
    parts: Tensor,
    gpu: Gpu,
    tile: ExpertTile,
) -> None:
    weights, named = packed.down, _Named.by(work, routing.expert_ids)
    tokens, top_k = routing.expert_ids.shape
    blocks = cdiv(weights.rows // TILE_ROWS, tile.row_tiles)
    arguments = (
        h, weights.words, weights.scales, or_unread(packed.down_bias, h), parts, named.tiles, named.order,
        routing.weights, tokens,
    )  # fmt: skip
    constants = {
        **weight_constants(weights), "TOP_K": top_k, "EXPERT_WORDS": named.expert_words,
        "HAS_BIAS": packed.down_bias is not None, **tile_constants(tile), **pdl_constant(gpu),
    }  # fmt: skip
    options = gemm_options(tile, tile.warps, gpu)
    launch(jit.down_small, (named.entries * blocks,), arguments, constants, options, MMA)


def _down_direct(packed: PackedExperts, h: Tensor, routing: Routing, y: Tensor, gpu: Gpu, tile: ExpertTile) -> None:
    weights = packed.down
    tokens, top_k = routing.expert_ids.shape
    experts = next_power_of_2(top_k)
    blocks = cdiv(weights.rows // TILE_ROWS, tile.row_tiles)
    arguments = (
        h, weights.words, weights.scales, or_unread(packed.down_bias, h), y, routing.expert_ids, routing.weights,
    )  # fmt: skip
    constants = {
        **weight_constants(weights), "TOP_K": top_k, "EXPERTS": experts, "HAS_BIAS": packed.down_bias is not None,
        **tile_constants(tile), **pdl_constant(gpu),
    }  # fmt: skip
    options = gemm_options(tile, experts * tile.warps, gpu)
    launch(jit.down_direct, (tokens * blocks,), arguments, constants, options, MMA)


def combine(parts: Tensor, y: Tensor, top_k: int, gpu: Gpu) -> None:
    """``parts [tokens * top_k, hidden]`` with their weights applied → ``y [tokens, hidden]``."""
    tokens, width = y.shape
    grid = (tokens, cdiv(width, COMBINE_BLOCK))
    constants = {"TOP_K": top_k, "BLOCK": COMBINE_BLOCK, **pdl_constant(gpu)}
    launch(pairs_jit.combine, grid, (parts, y, width), constants, {"num_warps": 4, **pdl_option(gpu)})
