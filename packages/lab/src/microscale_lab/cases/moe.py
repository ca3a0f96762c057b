"""Cases of ``moe``: expert layers by every path that the oracle may pick, alone and with a dense MLP.

Tolerances: sums in float32 apart, an answer differs from the reference by its roundings. The small-batch kernels round
to bf16 twice (the activations between the GEMMs, the answer), the grouped ones three times (also each expert's part).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from microscale.formats import FP8_BLOCK, MXFP8, BlockScaled, decode, encode
from microscale.hardware import Gpu
from microscale.kernels.dense.packed import pack
from microscale.kernels.dense.spec import DenseWeights
from microscale.kernels.moe.paths import (
    BLOCK_SCALED,
    BLOCK_SCALED_NVFP4,
    DIRECT,
    FP8_RESIDENT,
    LIST,
    OWN_LIST,
    WGMMA_FP8,
)
from microscale.kernels.moe.reference import apply_gate
from microscale.kernels.moe.spec import Mlp, MlpSpec, MoeOp, MoePath, MoeSpec
from microscale.kernels.moe.with_mlp import RUN
from microscale.kernels.narrow import nvfp4
from microscale.kernels.op import Activations, Reason
from microscale.kernels.small.reference import rms_norm
from microscale.planning import registry
from microscale.planning.paths import PathList
from microscale_lab.cases.case import Compared, Finish, KernelCase, OracleCase, compare, just_written
from microscale_lab.cases.errors import Errors, rms_step, rounded_bound
from microscale_lab.cases.experts import GELU, LAYERS, SILU, SWIGLU_HALVES, ExpertsInput, ExpertsProblem, e4m3_by_token

if TYPE_CHECKING:
    from torch import Tensor

MANY = [
    ExpertsInput("70 tokens, unused experts", 70, num_experts=16, hidden=352, intermediate=288, spread="unused"),
    ExpertsInput("67 tokens on the same experts, gelu", 67, hidden=160, intermediate=96, gate=GELU, bias=False,
                 spread="one"),
    ExpertsInput("90 tokens, halves, K odd in groups", 90, num_experts=5, top_k=3, hidden=288, intermediate=352,
                 gate=SWIGLU_HALVES),
    ExpertsInput("66 tokens, silu, K of two groups", 66, top_k=1, hidden=64, intermediate=96, gate=SILU, bias=False),
    ExpertsInput("40 tokens, 20 for each expert", 40, hidden=352, intermediate=288, size=6.0),
    ExpertsInput("190 tokens, 190 for each expert", 190, num_experts=2, hidden=352, intermediate=288),
]  # fmt: skip
"""More tokens than a small batch has, or enough for tiles of wgmma."""
SUMMED_BY_NORM = [ExpertsInput("3 tokens", 3, size=6.0), ExpertsInput("6 tokens, top 3", 6, top_k=3, hidden=352)]
FORMATS = {
    "mxfp4": {Activations.BF16: "triton_w4a16", Activations.MXFP8: "triton_w4a8"},
    "mxfp8": {Activations.BF16: "triton_w8a16", Activations.MXFP8: "triton_w8a8"},
    "nvfp4": {Activations.BF16: "triton_nvfp4_a16", Activations.NVFP4: "triton_w4a4"},
    "fp8_block": {Activations.BF16: "triton_fp8b_a16"},
}
"""The implementation of each format of weights and of activations."""


@cache
def problem_of(layer: ExpertsInput, fmt: str, device: str) -> ExpertsProblem:
    """It is never written to, so cards share it."""
    return ExpertsProblem.of(layer, fmt, device)


@dataclass(frozen=True)
class ExpertsCase(OracleCase):
    layer: ExpertsInput
    fmt: str
    activations: Activations

    op: ClassVar[str] = "moe"

    @property
    def entry(self) -> MoeOp[Any]:
        return registry.moe(FORMATS[self.fmt][self.activations])

    @property
    def spec(self) -> MoeSpec:
        layer = self.layer
        sizes = (layer.num_experts, layer.top_k, layer.hidden, layer.intermediate)
        return MoeSpec(*sizes, self.fmt, self.activations, layer.gate, layer.bias, layer.tokens)

    def refuses(self, gpu: Gpu) -> Reason | None:
        if reason := super().refuses(gpu):
            return reason
        if self.activations.narrow and self.path(gpu) not in QUANTISED:
            return "runs with bf16 activations at this size, which has a case of its own"
        return None

    def start(self, gpu: Gpu, device: str) -> Finish:
        problem, spec = problem_of(self.layer, self.fmt, device), self.spec
        path = self.path(gpu)
        just_written(problem.x, problem.routing.expert_ids, problem.routing.weights)
        y = self.entry.run(problem.packed, spec, gpu, problem.x, problem.routing, path)
        return lambda: hold_experts(y, problem, path)


@dataclass(frozen=True)
class SummedByNormCase(ExpertsCase):
    """Experts up to the sum of a token's, and the norm that adds them up: with a stream of zeros to the answer."""

    form: ClassVar[PathList] = PathList.PARTS

    def label(self) -> str:
        return "summed by the next norm"

    def start(self, gpu: Gpu, device: str) -> Finish:
        problem, spec = problem_of(self.layer, self.fmt, device), self.spec
        path = self.path(gpu)
        just_written(problem.x, problem.routing.expert_ids, problem.routing.weights)
        parts = self.entry.run_parts(problem.packed, spec, gpu, problem.x, problem.routing, path)
        weight = torch.ones(self.layer.hidden, device=device).bfloat16()
        stream = torch.zeros_like(problem.x)
        normed, y = registry.small("triton_small").on(gpu).add_rms_norm(parts, stream, weight, 1e-5)

        def finish() -> Iterator[Compared]:
            yield from hold_experts(y, problem, LIST)
            want = rms_norm(y, weight, 1e-5)
            yield compare("norm", normed, want, rounded_bound(want, "bf16", 2))

        return finish


SAME_NVFP4 = Errors(5 * rms_step("e2m1"), 4 * rms_step("bf16"))
"""Of a layer with the same 4-bit numbers. A gate's output that lies between two codes may round to the other."""
QUANTISED = (BLOCK_SCALED, BLOCK_SCALED_NVFP4, FP8_RESIDENT, WGMMA_FP8)
"""The paths whose products have 8-bit or 4-bit activations."""


def hold_experts(y: Tensor, problem: ExpertsProblem, path: MoePath[Any]) -> Iterator[Compared]:
    """An answer of this path against the reference, and against one that quantises alike."""
    exact = problem.expected()
    if path not in QUANTISED:
        roundings = 2 if path in (DIRECT, OWN_LIST, LIST) else 3
        if problem.weights.gate_up.format is FP8_BLOCK and roundings == 3:
            roundings = 5  # those of both matrices' weights
        yield compare("y", y, exact, rounded_bound(exact, "bf16", roundings))
        return
    if path is BLOCK_SCALED_NVFP4:
        yield compare("y", y, exact, rounded_bound(exact, "e2m1", 3))
        alike = problem.expected_quantised(nvfp4, nvfp4)
        yield compare("y of the same codes", y, alike, SAME_NVFP4)
        return
    # Two roundings to E4M3, and a group's largest element may saturate by 2**-3, twice a rounding.
    yield compare("y", y, exact, rounded_bound(exact, "e4m3", 3))
    if path is BLOCK_SCALED:
        alike = problem.expected_quantised()
        yield compare("y of the same codes", y, alike, rounded_bound(alike, "bf16", 2))
    else:
        alike = problem.expected_quantised(e4m3_by_token, gate_e4m3)
        yield compare("y of the same codes", y, alike, fp8_bound(problem.layer))


def gate_e4m3(h: Tensor) -> Tensor:
    """The gate's output in E4M3 under the one scale that the clamp at 7 allows: 7 * 8 * 2**3 is 448."""
    return (h * 8.0).to(torch.float8_e4m3fn).float() / 8.0


def fp8_bound(layer: ExpertsInput) -> Errors:
    """Of a layer with the same 8-bit numbers, on FP8 units without block scales.

    A sum that lies between two E4M3 codes may round to the other: one value may be off by a rounding to E4M3. Sums of
    E4M3 products keep about 14 bits on Hopper, and drop the rest after every 32 columns.
    """
    dropped = (layer.hidden + layer.intermediate) / 32 * 2.0**-14
    return Errors(5 * rms_step("e4m3"), 3 * rms_step("bf16") + dropped)


@dataclass(frozen=True)
class DenseMlp:
    """A dense MLP next to the experts: its weights and its own tokens."""

    gate_up: BlockScaled
    down: BlockScaled
    x: Tensor

    @classmethod
    def of(cls, units: int, hidden: int, tokens: int, device: str) -> DenseMlp:
        generator = torch.Generator(device).manual_seed(1)
        gate_up, down, x = (
            torch.randn(size, generator=generator, device=device) / scale
            for size, scale in (
                ((2 * units, hidden), hidden**0.5),
                ((hidden, units), units**0.5),
                ((tokens, hidden), 1.0),
            )
        )
        return cls(encode(gate_up, MXFP8), encode(down, MXFP8), x.bfloat16())

    @property
    def packed(self) -> Mlp:
        rows = self.gate_up.map(_in_runs)
        return Mlp(pack(DenseWeights(rows)), pack(DenseWeights(self.down)))

    def expected(self) -> Tensor:
        return apply_gate(self.x.float() @ decode(self.gate_up).T, GELU) @ decode(self.down).T


def _in_runs(rows: Tensor) -> Tensor:
    """All gate rows, then all up rows → runs of the ones, as many of the others, and so on."""
    return rows.view(2, -1, RUN, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


@dataclass(frozen=True)
class WithMlpCase(OracleCase):
    """Experts and a dense MLP in the same launches."""

    layer: ExpertsInput
    units: int

    op: ClassVar[str] = "moe"

    form: ClassVar[PathList] = PathList.WITH_MLP

    def label(self) -> str:
        return "with a dense MLP"

    @property
    def entry(self) -> MoeOp[Any]:
        return registry.moe("triton_w8a16")

    @property
    def spec(self) -> MoeSpec:
        layer = self.layer
        sizes = (layer.num_experts, layer.top_k, layer.hidden, layer.intermediate)
        mlp = MlpSpec(self.units, "mxfp8", packed=True, bias=False)
        return MoeSpec(*sizes, "mxfp8", Activations.BF16, layer.gate, layer.bias, layer.tokens, mlp)

    def start(self, gpu: Gpu, device: str) -> Finish:
        problem, spec = problem_of(self.layer, "mxfp8", device), self.spec
        mlp = DenseMlp.of(self.units, self.layer.hidden, self.layer.tokens, device)
        both = torch.stack((mlp.x, problem.x))
        path = self.path(gpu)
        just_written(both, problem.routing.expert_ids, problem.routing.weights)
        y = self.entry.run_with_mlp(problem.packed, mlp.packed, spec, gpu, both, problem.routing, path)

        def finish() -> Iterator[Compared]:
            for what, got, want in (("MLP", y[0], mlp.expected()), ("experts", y[1], problem.expected())):
                yield compare(what, got, want, rounded_bound(want, "bf16", 2))

        return finish


def cases() -> Iterator[KernelCase]:
    for fmt in FORMATS:
        for layer in (*LAYERS, *MANY):
            yield ExpertsCase(f"{fmt}, {layer.name}", layer, fmt, Activations.BF16)
        for layer in SUMMED_BY_NORM:
            yield SummedByNormCase(f"{fmt}, {layer.name}", layer, fmt, Activations.BF16)
        for narrow in FORMATS[fmt].keys() - {Activations.BF16}:
            yield from (ExpertsCase(f"{fmt}, {layer.name}", layer, fmt, narrow) for layer in MANY)
    for tokens in (1, 2):
        layer = ExpertsInput("next to an MLP", tokens, 16, 3, 352, 96, GELU, bias=False)
        yield WithMlpCase(f"{tokens} tokens", layer, 160)
