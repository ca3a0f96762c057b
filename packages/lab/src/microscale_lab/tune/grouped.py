"""What ``microscale tune`` runs of the grouped expert GEMMs: one layer with gpt-oss-120b's widths, at several shares of
pairs for each expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from microscale.formats import BLOCK, BlockScaled, block_format
from microscale.hardware import Feature, Gpu
from microscale.hardware.tiles import gemm
from microscale.hardware.tiles.gemm import BUSY_PAIRS, GemmCase, GemmPath
from microscale.hardware.tiles.tuned import TunedTile
from microscale.kernels.moe import grouped, grouped_wgmma, reference
from microscale.kernels.moe.packed import PackedExperts, pack_experts
from microscale.kernels.moe.spec import Gate, GateKind, MoeWeights, Routing
from microscale_lab.tune import candidates
from microscale_lab.tune.job import TileSearch, TuningProblem

if TYPE_CHECKING:
    from torch import Tensor

SHARES = (8, 16, 32, 64, 128, 256, 1024)
"""Pairs per expert that are measured; a tile serves up to the geometric mean of its share and the next."""
TOP_K = 4
GATE = Gate(GateKind.SWIGLU_CLAMPED, interleaved=True)
MAX_ERROR = {16: 1e-2, 8: 8e-2, 4: 0.3}
"""Relative RMS error against float32 above which a tile is wrong: three roundings to bf16, two to E4M3 or E2M1 (by the
activations' bits)."""
CHECKED_TOKENS = 16


@dataclass(frozen=True)
class GroupedShape:
    """The layer that is timed: gpt-oss-120b's, 1.7 GB in MXFP4. With 16 experts, which fill the SMs unevenly, narrower
    tiles win than on the real layer."""

    num_experts: int = 128
    hidden: int = 2880
    intermediate: int = 2880


Packing = Callable[[str], tuple[MoeWeights, PackedExperts]]


def jobs(gpu: Gpu, quick: bool) -> Iterator[TileSearch]:
    paths, shares = (runnable(gpu)[:1], (32,)) if quick else (runnable(gpu), SHARES)
    for path in paths:
        yield from jobs_of(path, gpu, shares, GroupedShape(num_experts=32) if quick else GroupedShape())


def jobs_of(path: GemmPath, gpu: Gpu, shares: Sequence[int], shape: GroupedShape) -> Iterator[TileSearch]:
    packing = packing_of(path, shape)
    tiles = list(candidates.of_gemm(path, gpu))
    for index, share in enumerate(shares):
        last = index + 1 == len(shares)
        up_to = BUSY_PAIRS if last else round((share * shares[index + 1]) ** 0.5)
        about = f"{path}, {shape.num_experts} experts of {shape.hidden} x {shape.intermediate}, {share} pairs each"
        yield TileSearch(gemm.SECTION, GemmCase(path, up_to), about, tiles, prepared(path, gpu, packing, share))


def packing_of(path: GemmPath, shape: GroupedShape) -> Packing:
    """One layer for all shares, and only while it is held."""

    @cache
    def packing(device: str) -> tuple[MoeWeights, PackedExperts]:
        experts = make_experts(shape, path, device)
        return experts, pack_experts(experts, GATE)

    return packing


def prepared(path: GemmPath, gpu: Gpu, packing: Packing, share: int) -> Callable[[str], TuningProblem]:
    """One layer at ``share`` pairs for each expert."""

    def prepare(device: str) -> TuningProblem:
        experts, packed = packing(device)
        x, routing = make_tokens(experts, share)

        def run() -> Tensor:
            if path.wgmma:
                return grouped_wgmma.run(packed, GATE, x, routing, gpu, fp8=path is GemmPath.W4A8_WGMMA)
            return grouped.run(packed, GATE, x, routing, gpu, block_scaled=path.block_scaled)

        few = Routing(routing.expert_ids[:CHECKED_TOKENS], routing.weights[:CHECKED_TOKENS])
        expected = reference.moe(x[:CHECKED_TOKENS], experts, few, GATE)

        def error() -> float:
            return float((run()[:CHECKED_TOKENS].float() - expected).norm() / expected.norm())

        return TuningProblem(run, error, MAX_ERROR[path.activation_bits])

    return prepare


def joined(rows: Sequence[TunedTile[Any, Any]]) -> list[TunedTile[Any, Any]]:
    """Neighbours with the same tile as one row."""
    found: list[TunedTile[Any, Any]] = []
    for row in rows:
        if found and found[-1].tile == row.tile and found[-1].key == replace(row.key, up_to=found[-1].key.up_to):
            found.pop()
        found.append(row)
    return found


def runnable(gpu: Gpu) -> list[GemmPath]:
    """The paths that the expert layers take on this card. With wgmma MXFP4 has kernels of its own."""
    if gpu.has(Feature.WGMMA):
        return [GemmPath.W4A16_WGMMA, GemmPath.W4A8_WGMMA, GemmPath.W8A16, GemmPath.W8A16_WGMMA]
    scaled = gpu.has(Feature.MX_MMA) or gpu.has(Feature.TCGEN05)
    return [path for path in GemmPath if not path.wgmma and (scaled or not path.block_scaled)]


def make_experts(shape: GroupedShape, path: GemmPath, device: str = "cuda") -> MoeWeights:
    """Random experts."""
    generator = torch.Generator(device).manual_seed(0)

    def random_bytes(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, dtype=torch.uint8, generator=generator, device=device)

    def weights(rows: int, columns: int) -> BlockScaled:
        nvfp4 = path is GemmPath.W4A4
        fmt = block_format("nvfp4" if nvfp4 else "mxfp4" if path.weight_bits == 4 else "mxfp8")
        size = (shape.num_experts, rows)
        codes = random_bytes(0, 256, *size, columns * fmt.bits // 8)
        if fmt.bits == 8:
            codes = torch.where(codes % 128 == 127, 0, codes)  # E4M3's NaN
        # Scales that bring the sum of a row of squares near 1: codes have an RMS of about 3 and 130.
        if nvfp4:
            row_scales = torch.full(size, 2.0**-7, device=device)
            return BlockScaled(codes, random_bytes(0x30, 0x40, *size, columns // fmt.block), fmt, row_scales)
        middle = 127 - (7 if fmt.bits == 4 else 13)
        return BlockScaled(codes, random_bytes(middle - 1, middle + 2, *size, columns // BLOCK), fmt)

    def bias(rows: int) -> Tensor:
        return torch.randn(shape.num_experts, rows, generator=generator, device=device).bfloat16()

    gate_up, down = weights(2 * shape.intermediate, shape.hidden), weights(shape.hidden, shape.intermediate)
    return MoeWeights(gate_up, down, bias(2 * shape.intermediate), bias(shape.hidden))


def make_tokens(experts: MoeWeights, share: int) -> tuple[Tensor, Routing]:
    """Tokens of which about ``share`` go to each expert, spread as a router spreads them."""
    num_experts, hidden, _ = experts.down.shape
    device = experts.down.device
    generator = torch.Generator(device).manual_seed(share)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    tokens = max(1, share * num_experts // TOP_K)
    values, ids = normal(tokens, num_experts).topk(TOP_K, dim=-1)
    routing = Routing(ids.int().contiguous(), values.softmax(dim=-1).contiguous())
    return normal(tokens, hidden).bfloat16(), routing
