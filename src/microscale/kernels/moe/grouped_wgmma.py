"""Launches of the grouped expert GEMMs on ``wgmma``, and the rule that chooses their tiles.

dispatch → prepare_tokens → grouped_gemm (gate and up) → grouped_gemm (down) → combine
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from microscale.hardware import Feature, Gpu
from microscale.kernels.layouts import TILE_K, TILE_ROWS, Packed
from microscale.kernels.moe import grouped_wgmma_jit as jit
from microscale.kernels.moe.packed import PackedExperts
from microscale.kernels.moe.routing import Dispatch, dispatch
from microscale.kernels.moe.small_batch import MODELS, combine, gate_constants, make_variant
from microscale.kernels.moe.spec import Gate, Routing
from microscale.kernels.op import Variant

PREPARE_BLOCK = 1024
MMA = r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16"


@dataclass(frozen=True)
class WgmmaTiles:
    """The shape of one grouped program."""

    rows: int
    columns: int
    """Tokens of a full tile; the tail of an expert takes half or a quarter of it."""
    stages: int
    warps: int
    overlap: bool = True
    """Convert the next K tile while one is in the matrix unit: another 16 registers a row tile."""

    def constants(self) -> dict[str, Any]:
        return {
            "BM": self.rows,
            "BN": self.columns,
            "STAGES": self.stages,
            "WARPS": self.warps,
            "OVERLAP": self.overlap,
        }


# Pairs an expert gets on average → tiles. Measured on an H200 with gpt-oss-120b's layer, Triton 3.6.0. Tiles much wider
# than an expert's share are mostly padding, narrower ones convert the weights more often.
TILES = (
    (24, WgmmaTiles(128, 32, 8, 4)),
    (96, WgmmaTiles(128, 64, 5, 4)),
    (1 << 30, WgmmaTiles(128, 128, 4, 4, overlap=False)),
)
# With fewer, the loop over K folds into straight code that Triton 3.6 fails to lower (an asynchronous copy under a
# condition that is false at compile time).
MIN_K_TILES = 4


def choose(pairs: int, num_experts: int) -> WgmmaTiles:
    per_expert = -(-pairs // num_experts)
    return next(tiles for up_to, tiles in TILES if per_expert <= up_to)


def serves(packed: PackedExperts) -> bool:
    """Whether both matrices are long enough along K."""
    return min(packed.gate_up.k_tiles, packed.down.k_tiles) >= MIN_K_TILES


def run(
    packed: PackedExperts, gate: Gate, x: Tensor, routing: Routing, gpu: Gpu, tiles: WgmmaTiles | None = None
) -> Tensor:
    """``x [tokens, hidden]`` bf16 → ``[tokens, hidden]`` bf16. No host synchronisation; sizes follow from shapes."""
    tokens, top_k = routing.expert_ids.shape
    y = torch.empty((tokens, packed.hidden), dtype=torch.bfloat16, device=x.device)
    if not tokens:
        return y
    tiles = tiles or choose(tokens * top_k, packed.num_experts)
    work = dispatch(routing.expert_ids, packed.num_experts, tiles.columns)
    prepared = prepare(x, packed.gate_up.k_tiles * TILE_K)
    width = packed.down.k_tiles * TILE_K
    # Columns past the intermediate size meet zero weights: they must be finite, so zero.
    new = torch.empty if width == packed.intermediate else torch.zeros
    h = new((tokens * top_k, width), dtype=torch.bfloat16, device=x.device)
    parts = torch.empty((tokens * top_k, packed.hidden), dtype=torch.bfloat16, device=x.device)
    _gemm(packed.gate_up, packed.gate_up_bias, gate, prepared, h, work, routing, tiles, first=True)
    _gemm(packed.down, packed.down_bias, gate, h, parts, work, routing, tiles, first=False)
    combine(parts, y, top_k, gpu)
    return y


def prepare(x: Tensor, padded: int) -> Tensor:
    """``x`` interleaved, times 2**64, with zeros up to ``padded`` columns."""
    out = torch.empty((x.shape[0], padded), dtype=torch.bfloat16, device=x.device)
    grid = (x.shape[0], triton.cdiv(padded, PREPARE_BLOCK))
    jit.prepare_tokens[grid](x, out, x.shape[1], x.stride(0), PADDED=padded, BLOCK=PREPARE_BLOCK, num_warps=4)
    return out


def _gemm(
    weights: Packed, bias: Tensor | None, gate: Gate, x: Tensor, out: Tensor, work: Dispatch, routing: Routing,
    tiles: WgmmaTiles, *, first: bool,
) -> None:  # fmt: skip
    blocks = triton.cdiv(weights.rows, tiles.rows)
    jit.grouped_gemm[(work.tiles.shape[0] * blocks,)](
        x, weights.words, weights.scales, x if bias is None else bias, out,
        work.offsets, work.tiles, work.order, routing.weights,
        KT=weights.k_tiles, ROW_TILES=weights.rows // TILE_ROWS, TOP_K=work.top_k, FIRST=first,
        HAS_BIAS=bias is not None, OUT_STRIDE=out.shape[1], **gate_constants(gate), **tiles.constants(),
        num_warps=tiles.warps,
    )  # fmt: skip


def variants(gpu: Gpu, implementation: str) -> Iterator[Variant]:
    """Every grouped ``wgmma`` kernel that may be launched on this card for the known models."""
    if not gpu.has(Feature.WGMMA):
        return
    for model in MODELS:
        for _, tiles in TILES:
            for first in (True, False):
                rows, k = (2 * model.intermediate, model.hidden) if first else (model.hidden, model.intermediate)
                constants = {
                    "KT": triton.cdiv(k, TILE_K),
                    "ROW_TILES": rows // TILE_ROWS,
                    "TOP_K": model.top_k,
                    "FIRST": first,
                    "HAS_BIAS": model.bias,
                    "OUT_STRIDE": triton.cdiv(model.intermediate, TILE_K) * TILE_K if first else rows,
                    **model.gate(),
                    **tiles.constants(),
                }
                name = f"wgmma {'gate_up' if first else 'down'} {model.label} {tuple(vars(tiles).values())}"
                types = {"out_ptr": "*bf16"}
                yield make_variant(implementation, name, jit.grouped_gemm, tiles.warps, constants, types, MMA)
        padded = triton.cdiv(model.hidden, TILE_K) * TILE_K
        constants = {"PADDED": padded, "BLOCK": PREPARE_BLOCK}
        name = f"prepare tokens {model.label}"
        yield make_variant(implementation, name, jit.prepare_tokens, 4, constants, {"out_ptr": "*bf16"})
