"""Launches of the small-batch expert layer, and the rule that chooses their tiles.

direct (1 or 2 tokens):   gate_up_small → down_direct
list (up to 64):          list_small_batch → gate_up_small → down_small → combine
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from microscale.hardware import Feature, Gpu
from microscale.kernels.launch import launch
from microscale.kernels.layouts import TILE_K, TILE_ROWS
from microscale.kernels.moe import pairs_jit
from microscale.kernels.moe import small_batch_jit as jit
from microscale.kernels.moe.packed import PackedExperts
from microscale.kernels.moe.routing import Dispatch, tile_bound
from microscale.kernels.moe.spec import Gate, GateKind, Routing
from microscale.kernels.numbers import cdiv, next_power_of_2

MAX_TOKENS = 64
MAX_TOP_K = 16
DIRECT_TOKENS = 2
COLUMNS = 8
"""Tokens that one program of the list serves: the columns of m16n8k16."""
COMBINE_BLOCK = 1024
LIST_WARPS = 4
MMA = r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32"
# With fewer warps than this on an SM the ramp of each warp shows, and two along K share a row tile (H200: 14.6 against
# 15.0 us for one token of gpt-oss-120b's gate_up, 8.9 against 10.9 for its down).
FEW_WARPS = 24
# Warps along K, registers of a thread and tiles of MXFP4 in a batch, from most to least. A second wave of programs
# costs a ramp of its own: gpt-oss-120b on an H200, one token (1440 warps) 20.1 us with the second, 21.9 with 128 and 5,
# 22.4 with 2 warps a row tile in 1.4 waves; two tokens 35.9 with the third, 43 with 128 and 4 in 1.4 waves. Gemma 4,
# one token (704 row tiles), 30 layers: 31 us less with the first than with the second.
ONE_WAVE = ((2, 168, 8), (1, 168, 5), (1, 80, 2))
# Of the machine's room: programs of the kernel before still hold some (88 registers, 99 % full: 24.8 us and not 20.8).
WAVE_SHARE = 0.93
# To hide a microsecond of latency an SM needs as many KB in flight as it gets GB/s. Under 15 (all cards with GDDR or
# LPDDR; H200: 36) 16 warps with batches of 3 tiles of 544 bytes, 26 to 52 KB, are plenty, and take fewer registers.
SLOW_GBS_PER_SM = 15
SLOW_WARPS = 12


@dataclass(frozen=True)
class Tiles:
    """The shape of one small-batch GEMM program."""

    row_tiles: int
    """Row tiles of 16 rows."""
    warps_n: int
    """Warps across the row tiles."""
    slices: int
    """Warps along K; their sums are added through shared memory."""
    ahead: int
    """Tiles of K in a batch; a warp keeps one to two batches in flight."""
    registers: int | None = None
    """At most, of a thread; without it, what ``_gemm_options`` says."""

    def constants(self) -> dict[str, int]:
        return {"B": self.row_tiles, "WARPS_N": self.warps_n, "SLICES": self.slices, "AHEAD": self.ahead}


@dataclass(frozen=True)
class Shape:
    """What the choice of tiles depends on, of one of the two matrices of an expert."""

    rows: int
    k: int
    bits: int

    @property
    def row_tiles(self) -> int:
        return self.rows // TILE_ROWS

    @property
    def k_tiles(self) -> int:
        return -(-self.k // TILE_K)


def direct_gate_up_tiles(shape: Shape, tokens: int, top_k: int, gpu: Gpu) -> Tiles:
    """A warp for each row tile of each of the tokens' experts: all of them at once, with what registers that leaves."""
    if not gpu.has(Feature.WGMMA):  # measured on an H200; elsewhere some of these registers are too few
        return direct_tiles(shape, tokens, top_k, gpu)
    for slices, registers, ahead in ONE_WAVE:
        room = gpu.registers_per_sm // (32 * registers) * gpu.num_sms
        if slices * tokens * top_k * shape.row_tiles <= WAVE_SHARE * room:
            return Tiles(1, 1, slices, _ahead(shape, gpu, ahead, slices), registers)
    return Tiles(1, 1, 1, _ahead(shape, gpu, 4, 1))


def direct_tiles(shape: Shape, tokens: int, top_k: int, gpu: Gpu) -> Tiles:
    """One row tile a program; its warps are slices of K (and for down the token's experts)."""
    # 16 warps of 128 registers would take a whole SM.
    split = tokens * top_k * shape.row_tiles < FEW_WARPS * gpu.num_sms and top_k <= 4 and shape.k_tiles > 1
    slices = 2 if split else 1
    if gpu.has(Feature.WGMMA) and top_k > 4 and shape.bits == 8:
        # Programs of 8 warps and more, two on an SM (H200, one token of Gemma 4, 30 layers: 48 us less than with 2
        # tiles ahead and what registers ptxas takes).
        return Tiles(1, 1, slices, _ahead(shape, gpu, 6, slices), 128)
    if gpu.has(Feature.WGMMA) and tokens == 1 and shape.bits == 4:
        # One warp an expert with all registers (H200, one token, 24 layers of gpt-oss-20b: 1111 us → 1087; 36 of 120b:
        # no change).
        return Tiles(1, 1, 1, _ahead(shape, gpu, 9, 1), 255)
    return Tiles(1, 1, slices, _ahead(shape, gpu, 4, slices))


def list_tiles(shape: Shape, gpu: Gpu) -> Tiles:
    """Four row tiles, one for each warp.

    16 warps of at most 128 registers on an SM. Measured on an H200, 8 tokens of gpt-oss-120b: batches of 3 and of 5
    tiles within 1 %, of 7 and 9 (more registers, fewer warps) 15 % slower; two row tiles a warp 6 % slower.
    """
    return Tiles(4, 4, 1, _ahead(shape, gpu, 5, 1))


def _ahead(shape: Shape, gpu: Gpu, tiles: int, slices: int) -> int:
    """``tiles`` of MXFP4, or as many bytes of MXFP8; never more than a slice has."""
    if _slow_memory(gpu):
        tiles = 3
    return max(1, min(tiles * 4 // shape.bits, -(-shape.k_tiles // slices)))


def gate_constants(gate: Gate) -> dict[str, Any]:
    return {"GELU": gate.kind is GateKind.GELU_TANH, "ALPHA": gate.alpha, "LIMIT": gate.limit}


def pdl_constant(gpu: Gpu) -> dict[str, bool]:
    """Whether a kernel takes part in programmatic dependent launch, as it is told itself."""
    return {"PDL": gpu.has(Feature.PDL)}


def pdl_option(gpu: Gpu) -> dict[str, bool]:
    """The same, as its launch is told."""
    return {"launch_pdl": True} if gpu.has(Feature.PDL) else {}


def _gemm_options(gpu: Gpu, warps: int, registers: int | None = None) -> dict[str, Any]:
    """Launch options of a GEMM. Left alone ptxas aims at 16 warps an SM, 128 registers, and rather spills a word or two
    than take 129. That many warps pay where memory is fast; elsewhere whole programs of up to 12 warps do, with all the
    registers that leaves them (168 for programs of 4 warps, 255 for one of 8), and nothing spills."""
    options: dict[str, Any] = {"num_warps": warps, **pdl_option(gpu)}
    if registers is not None:
        options["maxnreg"] = registers
    elif _slow_memory(gpu):
        programs = max(1, SLOW_WARPS // warps)
        options["maxnreg"] = min(255, gpu.registers_per_sm // (32 * warps * programs) // 8 * 8)
    return options


def _slow_memory(gpu: Gpu) -> bool:
    return gpu.bandwidth_gbs < SLOW_GBS_PER_SM * gpu.num_sms


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer that the kernel does not follow stands in for a tensor that is not there."""
    return other if tensor is None else tensor


def run(packed: PackedExperts, gate: Gate, x: Tensor, routing: Routing, gpu: Gpu) -> Tensor:
    """``x [tokens, hidden]`` bf16 → ``[tokens, hidden]`` bf16. No host synchronisation; sizes follow from shapes."""
    tokens, top_k = routing.expert_ids.shape
    # down_direct reads, and does not use, rows up to a power of two.
    rows = tokens * top_k + next_power_of_2(top_k) - top_k
    h = torch.empty((rows, packed.intermediate), dtype=torch.bfloat16, device=x.device)
    y = torch.empty((tokens, packed.hidden), dtype=torch.bfloat16, device=x.device)
    if not tokens:
        return y
    gate_up = Shape(packed.gate_up.rows, packed.gate_up.k, packed.gate_up.format.bits)
    down = Shape(packed.down.rows, packed.down.k, packed.down.format.bits)
    if tokens <= DIRECT_TOKENS:
        _gate_up(packed, gate, x, h, routing.expert_ids, None, gpu, direct_gate_up_tiles(gate_up, tokens, top_k, gpu))
        _down_direct(packed, h, routing, y, gpu, direct_tiles(down, tokens, top_k, gpu))
        return y
    work, scaled = make_list(x, routing.expert_ids, packed.num_experts, gpu)
    parts = torch.empty((tokens * top_k, packed.hidden), dtype=torch.float32, device=x.device)
    _gate_up(packed, gate, scaled, h, routing.expert_ids, work, gpu, list_tiles(gate_up, gpu))
    _down(packed, h, routing, work, parts, gpu, list_tiles(down, gpu))
    combine(parts, y, top_k, gpu)
    return y


def make_list(
    x: Tensor, ids: Tensor, num_experts: int, gpu: Gpu, columns: int = COLUMNS, padded: int = 0
) -> tuple[Dispatch, Tensor]:
    """The work list of at most ``MAX_TOKENS`` tokens, in tiles of ``columns``, and ``x`` times 2**64.

    ``padded``: tokens in the order, and with so many columns, as ``grouped_wgmma`` wants them.
    """
    tokens, top_k = ids.shape
    bound = tile_bound(ids.numel(), num_experts, columns)
    order = torch.empty(ids.numel(), dtype=torch.int32, device=x.device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=x.device)
    tiles = torch.empty((bound, 4), dtype=torch.int32, device=x.device)
    scaled = torch.empty((tokens, padded or x.shape[1]), dtype=torch.bfloat16, device=x.device)
    arguments = (ids, offsets, tiles, order, x, scaled, ids.numel(), bound, num_experts, x.shape[1], x.stride(0))
    constants = list_constants(ids.numel(), num_experts, gpu, columns, padded)
    options = {"num_warps": LIST_WARPS, **pdl_option(gpu)}
    launch(pairs_jit.list_small_batch, (num_experts + tokens,), arguments, constants, options)
    return Dispatch(offsets, order, tiles, columns, top_k), scaled


def list_constants(pairs: int, num_experts: int, gpu: Gpu, columns: int = COLUMNS, padded: int = 0) -> dict[str, Any]:
    sizes = {"PAIRS": max(32, next_power_of_2(pairs)), "EXPERTS": max(32, next_power_of_2(num_experts))}
    return {**sizes, "COLUMNS": columns, "PADDED": padded, "BLOCK": 1024, **pdl_constant(gpu)}


def _gate_up(
    packed: PackedExperts, gate: Gate, x: Tensor, h: Tensor, ids: Tensor, work: Dispatch | None, gpu: Gpu, tiles: Tiles
) -> None:
    weights = packed.gate_up
    entries = ids.numel() if work is None else work.tiles.shape[0]
    blocks = cdiv(weights.rows // TILE_ROWS, tiles.row_tiles)
    arguments = (
        x, weights.words, weights.scales, _or(packed.gate_up_bias, x), h,
        ids if work is None else work.tiles, ids if work is None else work.order, x.stride(0),
    )  # fmt: skip
    constants = {
        "K": weights.k, "ROW_TILES": weights.rows // TILE_ROWS, "TOP_K": ids.shape[1], "BITS": weights.format.bits,
        "DIRECT": work is None, "HAS_BIAS": packed.gate_up_bias is not None, **gate_constants(gate),
        **tiles.constants(), **pdl_constant(gpu),
    }  # fmt: skip
    options = _gemm_options(gpu, tiles.warps_n * tiles.slices, tiles.registers)
    launch(jit.gate_up_small, (entries * blocks,), arguments, constants, options, MMA)


def _down(
    packed: PackedExperts, h: Tensor, routing: Routing, work: Dispatch, parts: Tensor, gpu: Gpu, tiles: Tiles
) -> None:
    weights = packed.down
    blocks = cdiv(weights.rows // TILE_ROWS, tiles.row_tiles)
    arguments = (
        h, weights.words, weights.scales, _or(packed.down_bias, h), parts, work.tiles, work.order, routing.weights,
    )  # fmt: skip
    constants = {
        "K": weights.k, "ROW_TILES": weights.rows // TILE_ROWS, "BITS": weights.format.bits,
        "HAS_BIAS": packed.down_bias is not None, **tiles.constants(), **pdl_constant(gpu),
    }  # fmt: skip
    options = _gemm_options(gpu, tiles.warps_n * tiles.slices)
    launch(jit.down_small, (work.tiles.shape[0] * blocks,), arguments, constants, options, MMA)


def _down_direct(packed: PackedExperts, h: Tensor, routing: Routing, y: Tensor, gpu: Gpu, tiles: Tiles) -> None:
    weights = packed.down
    tokens, top_k = routing.expert_ids.shape
    experts = next_power_of_2(top_k)
    blocks = cdiv(weights.rows // TILE_ROWS, tiles.row_tiles)
    arguments = (
        h, weights.words, weights.scales, _or(packed.down_bias, h), y, routing.expert_ids, routing.weights,
    )  # fmt: skip
    constants = {
        "K": weights.k, "ROW_TILES": weights.rows // TILE_ROWS, "TOP_K": top_k, "EXPERTS": experts,
        "BITS": weights.format.bits, "HAS_BIAS": packed.down_bias is not None, **tiles.constants(),
        **pdl_constant(gpu),
    }  # fmt: skip
    options = _gemm_options(gpu, experts * tiles.warps_n * tiles.slices, tiles.registers)
    launch(jit.down_direct, (tokens * blocks,), arguments, constants, options, MMA)


def combine(parts: Tensor, y: Tensor, top_k: int, gpu: Gpu) -> None:
    """``parts [tokens * top_k, hidden]`` with their weights applied → ``y [tokens, hidden]``."""
    tokens, width = y.shape
    grid = (tokens, cdiv(width, COMBINE_BLOCK))
    constants = {"TOP_K": top_k, "BLOCK": COMBINE_BLOCK, **pdl_constant(gpu)}
    launch(pairs_jit.combine, grid, (parts, y, width), constants, {"num_warps": 4, **pdl_option(gpu)})
