"""What ``microscale tune`` runs of expert layers with a dense MLP in their launches: Gemma 4's, one token and two,
weights rotating so that none are read from L2. One GEMM's tile is on trial, the other runs as it would, or as it may.

Rows turn this way on for a family. So there are none where it is slower than what a model does without them: experts
and MLP on two streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator

from microscale.hardware import Gpu
from microscale.hardware.tiles import experts
from microscale.hardware.tiles.experts import ANY_LOAD, ExpertCase, ExpertGemm, ExpertTile
from microscale.hardware.tiles.tuned import Section, TunedTile
from microscale.kernels.dense import small_batch as dense_small_batch
from microscale.kernels.dense.packed import pack
from microscale.kernels.dense.reference import dense as dense_reference
from microscale.kernels.dense.spec import DenseSpec, DenseWeights
from microscale.kernels.layouts import TILE_K, TILE_ROWS
from microscale.kernels.moe import small_batch, with_mlp
from microscale.kernels.moe.packed import PackedExperts, pack_experts
from microscale.kernels.moe.reference import apply_gate
from microscale.kernels.moe.reference import moe as moe_reference
from microscale.kernels.moe.spec import Activations, Gate, Mlp, MoeWeights, Routing
from microscale.kernels.small.fused import TritonSmall
from microscale.planning.ops import SideStream
from microscale_lab.kernel_bench import dense as bench_dense
from microscale_lab.kernel_bench import moe
from microscale_lab.kernel_bench.layers import layer_spec
from microscale_lab.tune import candidates
from microscale_lab.tune.crossing import TIE
from microscale_lab.tune.job import QUICK_TILES, Bench, TuningProblem

if TYPE_CHECKING:
    from torch import Tensor

MODEL = "gemma-4-26b-a4b"
NUM_LAYERS = 3
TOKENS = (1, 2)


def jobs(gpu: Gpu, quick: bool) -> Iterator[WithMlpJob]:
    yield WithMlpJob(gpu)


def mlp_units() -> int:
    return layer_spec(MODEL, "mlp.down", DenseSpec).columns


@dataclass(frozen=True)
class LayersWithMlp:
    """Expert layers with their MLPs, and a batch."""

    layer: moe.ExpertLayer
    gate: Gate
    """Of the MLP, whose rows come in runs."""
    packed: list[tuple[PackedExperts, Mlp]]
    first: tuple[MoeWeights, DenseWeights, DenseWeights]
    """The weights of the first, as the reference takes them."""
    x: Tensor  # [2, tokens, hidden]: for the MLP and for the experts
    routing: Routing

    @classmethod
    def of(cls, tokens: int, device: str) -> LayersWithMlp:
        generator = Generator(device).manual_seed(0)
        layer, units = moe.LAYERS[MODEL], mlp_units()
        made = [_weights(layer, units, generator) for _ in range(NUM_LAYERS)]
        packed = [(pack_experts(each, layer.gate), Mlp(pack(gate_up), pack(down))) for each, gate_up, down in made]
        x, routing = moe.random_tokens(layer, tokens, generator)
        other = torch.randn(x.shape, device=device, generator=generator).to(x.dtype)
        gate = replace(layer.gate, interleaved=True, run=with_mlp.RUN)
        return cls(layer, gate, packed, made[0], torch.stack((other, x)), routing)

    def expected(self) -> tuple[Tensor, Tensor]:
        """Of the MLP, and of the experts, in float32."""
        weights, gate_up, down = self.first
        of_mlp = dense_reference(apply_gate(dense_reference(self.x[0], gate_up), self.gate), down)
        return of_mlp, moe_reference(self.x[1], weights, self.routing, self.layer.gate)

    def in_their_launches(self, gpu: Gpu, index: int) -> tuple[Tensor, Tensor]:
        packed, mlp = self.packed[index]
        both = with_mlp.run(packed, mlp, self.layer.spec(self.x.shape[1]), gpu, self.x, self.routing)
        return both[0], both[1]

    def on_two_streams(self, gpu: Gpu, streams: SideStream, index: int) -> tuple[Tensor, Tensor]:
        packed, mlp = self.packed[index]
        spec, small = self.layer.spec(self.x.shape[1]), TritonSmall(gpu)

        def of_mlp() -> Tensor:
            units = small.gated(dense_small_batch.run(mlp.gate_up, gpu, self.x[0], None), self.gate)
            return dense_small_batch.run(mlp.down, gpu, units, None)

        return streams(of_mlp, lambda: small_batch.run_direct(packed, spec, gpu, self.x[1], self.routing), at_once=True)

    def problem(self, gpu: Gpu, *, apart: bool = False) -> TuningProblem:
        expected, streams = self.expected(), SideStream(self.x.device)

        def run(index: int = 0) -> tuple[Tensor, Tensor]:
            return self.on_two_streams(gpu, streams, index) if apart else self.in_their_launches(gpu, index)

        def error() -> float:
            errors = [(ours.float() - want).norm() / want.norm() for ours, want in zip(run(), expected, strict=True)]
            return float(torch.stack(errors).max())

        tolerance = moe.RMS_TOLERANCE[Activations.BF16]
        return TuningProblem(lambda: [run(index) for index in range(NUM_LAYERS)], error, tolerance, NUM_LAYERS)


def _weights(layer: moe.ExpertLayer, units: int, generator: Generator) -> tuple[MoeWeights, DenseWeights, DenseWeights]:
    shapes = (2 * units, layer.hidden), (layer.hidden, units)
    # As of an lm_head: without a bias.
    mlp = [bench_dense.DenseShape("mlp", *shape, is_head=True) for shape in shapes]
    gate_up, down = (bench_dense.random_weights(shape, layer.weight_format, generator) for shape in mlp)
    return moe.random_experts(layer, generator), gate_up, down


@dataclass(frozen=True)
class WithMlpJob:
    """The tiles of both GEMMs: gate and up for one token and for two, down for one."""

    gpu: Gpu
    few: bool = False

    @property
    def section(self) -> Section[Any, Any]:
        return experts.SECTION

    @property
    def keys(self) -> tuple[ExpertCase, ...]:
        return (*(self._gate_up_key(tokens) for tokens in TOKENS), self._down_key)

    @property
    def steps(self) -> int:
        gate_up, down = (len(self._tiles(gemm)) for gemm in (ExpertGemm.GATE_UP_WITH_MLP, ExpertGemm.DOWN_WITH_MLP))
        return len(TOKENS) * gate_up + down

    def quick(self) -> WithMlpJob:
        return replace(self, few=True)

    def rows(self, bench: Bench) -> list[TunedTile[Any, Any]]:
        found: list[TunedTile[Any, Any]] = []
        down = self._in_use(ExpertGemm.DOWN_WITH_MLP)
        for tokens in TOKENS:
            found.append(self._best(bench, self._gate_up_key(tokens), tokens, self._down_key, down))
        first = found[0]
        found.append(self._best(bench, self._down_key, TOKENS[0], first.key, first.tile))
        layers = LayersWithMlp.of(TOKENS[0], bench.device)
        apart = bench.measure_one(layers.problem(self.gpu, apart=True))
        said = f"; on two streams {apart:.1f} us"
        ours = found[-1].measured.us
        assert ours is not None
        if ours > (1 + TIE) * apart:
            return []
        return [replace(row, measured=replace(row.measured, run=row.measured.run + said)) for row in found]

    def _best(
        self, bench: Bench, key: ExpertCase, tokens: int, other: ExpertCase, tile: ExpertTile
    ) -> TunedTile[Any, Any]:
        about = f"{key.gemm}, an expert layer of {MODEL} with its MLP, {tokens} tokens"
        problem = (
            LayersWithMlp.of(tokens, bench.device).problem(self.gpu).under(self.section, self.gpu.family, other, tile)
        )
        best = bench.fastest(self.section, key, self._tiles(key.gemm), about, problem)
        return bench.row(key, best.tile, f"{about}; {best.text}", best.us)

    def _gate_up_key(self, tokens: int) -> ExpertCase:
        """Of the row that serves the case today, or of a new one: the last of them serves any load."""
        gemm, layer = ExpertGemm.GATE_UP_WITH_MLP, moe.LAYERS[MODEL]
        rows = tokens * layer.top_k * 2 * layer.intermediate + 2 * mlp_units()
        serving, _ = experts.find(gemm, 8, tokens, layer.top_k, rows // TILE_ROWS, self.gpu)
        load = ANY_LOAD if tokens == TOKENS[-1] else round(rows // TILE_ROWS / self.gpu.num_sms + 0.01, 2)
        return serving or ExpertCase(gemm, 8, with_mlp.MAX_TOKENS, 1, load)

    @property
    def _down_key(self) -> ExpertCase:
        gemm, layer = ExpertGemm.DOWN_WITH_MLP, moe.LAYERS[MODEL]
        row_tiles = layer.top_k * layer.hidden // TILE_ROWS
        serving, _ = experts.find(gemm, 8, TOKENS[0], layer.top_k, row_tiles, self.gpu)
        return serving or ExpertCase(gemm, 8, with_mlp.MAX_TOKENS, 1, ANY_LOAD)

    def _in_use(self, gemm: ExpertGemm) -> ExpertTile:
        return self._tiles(gemm)[0]

    def _tiles(self, gemm: ExpertGemm) -> list[ExpertTile]:
        layer = moe.LAYERS[MODEL]
        key = self._down_key if gemm is ExpertGemm.DOWN_WITH_MLP else self._gate_up_key(TOKENS[0])
        k = layer.intermediate if gemm is ExpertGemm.DOWN_WITH_MLP else layer.hidden
        found = candidates.of_experts_with_mlp(key, -(-k // TILE_K), self.gpu)
        return found[:: max(1, len(found) // QUICK_TILES)][:QUICK_TILES] if self.few else found
