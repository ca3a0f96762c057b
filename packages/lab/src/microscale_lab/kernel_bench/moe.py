"""``microscale bench kernels moe``: one expert layer at a range of token counts.

Each row is checked against the float32 reference on a sample of tokens before it is timed. Weights rotate over several
layers, so that none is read from L2; a layer is gather, both GEMMs with bias and activation and the weighted sum, with
routing given as expert ids and weights: sorting the pairs is inside the figure. Times are of CUDA-graph replays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from microscale.errors import Unsupported
from microscale.formats import BlockScaled, block_format
from microscale.hardware import Gpu
from microscale.kernels.moe.bf16_activations import TritonFp8BlockA16, TritonNvfp4A16, TritonW4A16, TritonW8A16
from microscale.kernels.moe.cost import activation_bytes, bytes_per_expert, expert_flops
from microscale.kernels.moe.narrow_activations import BlockScaledMoe, TritonW4A8, TritonW8A8
from microscale.kernels.moe.packed import PackedExperts
from microscale.kernels.moe.reference import moe
from microscale.kernels.moe.spec import Activations, Gate, GateKind, MoeSpec, MoeWeights, Routing
from microscale_lab.calls import run_moe
from microscale_lab.kernel_bench.rows import KernelRow, check, counting, row
from microscale_lab.kernel_bench.timing import Ceilings, graph_us, measure_ceilings, present_gpu
from microscale_lab.predict.measured_as import path_name

if TYPE_CHECKING:
    from torch import Tensor

TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 2048, 8192)
CHECKED_TOKENS = 24
# Three roundings to bf16, of 1.6e-3 RMS each, on the way, or two to E4M3, of 2.5e-2: see tests/gpu/test_moe.py.
RMS_TOLERANCE = {Activations.BF16: 4.8e-3, Activations.MXFP8: 5e-2}


@dataclass(frozen=True)
class ExpertLayer:
    """The expert layer of a known model."""

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    weight_format: str
    gate: Gate
    bias: bool

    def spec(self, tokens: int, activations: Activations = Activations.BF16) -> MoeSpec:
        sizes = (self.num_experts, self.top_k, self.hidden, self.intermediate)
        return MoeSpec(*sizes, self.weight_format, activations, self.gate, self.bias, tokens)


_SWIGLU = Gate(GateKind.SWIGLU_CLAMPED, interleaved=True)
_GELU = Gate(GateKind.GELU_TANH, interleaved=False)
_SILU = Gate(GateKind.SILU, interleaved=False)
LAYERS = {
    "gpt-oss-120b": ExpertLayer(128, 4, 2880, 2880, "mxfp4", _SWIGLU, bias=True),
    "gpt-oss-20b": ExpertLayer(32, 4, 2880, 2880, "mxfp4", _SWIGLU, bias=True),
    "gemma-4-26b-a4b": ExpertLayer(128, 8, 2816, 704, "mxfp8", _GELU, bias=False),
    "qwen3-30b-a3b": ExpertLayer(128, 8, 2048, 768, "mxfp8", _SILU, bias=False),
    "256-experts": ExpertLayer(256, 8, 2048, 512, "nvfp4", _SILU, bias=False),
}
_IMPLEMENTATIONS: dict[tuple[str, Activations], TritonW4A16 | BlockScaledMoe] = {
    ("mxfp4", Activations.BF16): TritonW4A16(),
    ("mxfp8", Activations.BF16): TritonW8A16(),
    ("nvfp4", Activations.BF16): TritonNvfp4A16(),
    ("fp8_block", Activations.BF16): TritonFp8BlockA16(),
    ("mxfp4", Activations.MXFP8): TritonW4A8(),
    ("mxfp8", Activations.MXFP8): TritonW8A8(),
}


def _random(shape: tuple[int, int, int], fmt_name: str, generator: torch.Generator) -> BlockScaled:
    """Weights of about unit gain: every code is as likely as any other, scales vary over four octaves."""
    fmt = block_format(fmt_name)
    experts, rows, k = shape
    # 0x7F would be NaN in E4M3; the top exponents are left out so that both formats have like magnitudes.
    high = 256 if fmt.bits == 4 else 0x48

    def random_bytes(low: int, high: int, width: int) -> Tensor:
        return torch.randint(
            low, high, (experts, rows, width), dtype=torch.uint8, device=generator.device, generator=generator
        )

    codes = random_bytes(0, high, k * fmt.bits // 8)
    if fmt.scale_bytes == 4:
        groups = torch.rand(experts, rows, k // fmt.block, device=generator.device, generator=generator)
        return BlockScaled(codes, (groups + 0.5).mul(2.0**-8).bfloat16().float(), fmt)
    if not fmt.has_row_scales:
        return BlockScaled(codes, random_bytes(117, 121, k // fmt.block), fmt)
    # E4M3 from 32 to 416, under float32 scales that differ from row to row.
    rows_of = torch.rand(experts, rows, device=generator.device, generator=generator)
    return BlockScaled(codes, random_bytes(0x60, 0x7E, k // fmt.block), fmt, (rows_of + 0.5) * 2.0**-16)


def random_experts(layer: ExpertLayer, generator: torch.Generator) -> MoeWeights:
    experts, hidden, units = layer.num_experts, layer.hidden, layer.intermediate

    def bias(rows: int) -> Tensor | None:
        if not layer.bias:
            return None
        return torch.randn(experts, rows, device=generator.device, generator=generator).mul(0.1).bfloat16()

    gate_up = _random((experts, 2 * units, hidden), layer.weight_format, generator)
    down = _random((experts, hidden, units), layer.weight_format, generator)
    return MoeWeights(gate_up, down, bias(2 * units), bias(hidden))


def random_tokens(layer: ExpertLayer, tokens: int, generator: torch.Generator) -> tuple[Tensor, Routing]:
    logits = torch.randn(tokens, layer.num_experts, device=generator.device, generator=generator)
    values, ids = logits.topk(layer.top_k, dim=-1)
    x = torch.randn(tokens, layer.hidden, device=generator.device, generator=generator).bfloat16()
    return x, Routing(ids.int().contiguous(), values.softmax(dim=-1).contiguous())


def rms_error(y: Tensor, x: Tensor, routing: Routing, weights: MoeWeights, gate: Gate) -> float:
    """Relative RMS error on a sample of tokens."""
    sample = torch.randperm(x.shape[0], device=x.device)[:CHECKED_TOKENS]
    some = Routing(routing.expert_ids[sample].contiguous(), routing.weights[sample].contiguous())
    want = moe(x[sample], weights, some, gate)
    return float((y[sample].float() - want).norm() / want.norm())


def run(
    model: str = "gpt-oss-120b",
    tokens: Sequence[int] = TOKENS,
    activations: Activations = Activations.BF16,
    weight_format: str | None = None,
    num_layers: int = 5,
    repeats: int = 20,
) -> Iterator[KernelRow]:
    """Rows as they are measured. The first comes after the ceilings, some seconds in. ``weight_format``: instead of the
    model's own."""
    gpu = present_gpu()
    if model not in LAYERS:
        raise Unsupported(f"Unknown expert layer {model!r}; known are {', '.join(LAYERS)}.")
    layer = LAYERS[model]
    if weight_format is not None:
        layer = replace(layer, weight_format=weight_format)
        model = f"{model} {weight_format}"
    implementation = _IMPLEMENTATIONS.get((layer.weight_format, activations))
    if implementation is None:
        known = ", ".join(f"{fmt} with {kind}" for fmt, kind in _IMPLEMENTATIONS)
        raise Unsupported(
            f"No expert kernel reads {layer.weight_format} with {activations} activations; known: {known}."
        )
    reason = implementation.supports(layer.spec(1, activations), gpu)
    if reason is not None:
        raise Unsupported(f"The experts of {model} cannot run so on {gpu.name}: {implementation.name} {reason}.")
    ceilings = measure_ceilings()
    generator = torch.Generator("cuda").manual_seed(0)
    checked = random_experts(layer, generator)
    packed = [implementation.pack(checked, layer.spec(1))]
    packed += [implementation.pack(random_experts(layer, generator), layer.spec(1)) for _ in range(num_layers - 1)]
    for count in tokens:
        inputs = [random_tokens(layer, count, generator) for _ in packed]
        yield _measure(model, layer, layer.spec(count, activations), packed, inputs, checked, ceilings, repeats, gpu)


def _measure(
    model: str,
    layer: ExpertLayer,
    spec: MoeSpec,
    packed: list[PackedExperts],
    inputs: list[tuple[Tensor, Routing]],
    checked: MoeWeights,
    ceilings: Ceilings,
    repeats: int,
    gpu: Gpu,
) -> KernelRow:
    implementation = _IMPLEMENTATIONS[spec.weight_format, spec.activations]
    x, routing = inputs[0]
    case = f"{model}, {spec.tokens} tokens"
    with counting(path_name(implementation, "experts", spec, gpu)) as launched:
        first = run_moe(implementation, packed[0], spec, gpu, x, routing)
    error = rms_error(first, x, routing, checked, layer.gate)
    check(implementation.name, case, gpu.name, error, RMS_TOLERANCE[spec.activations])

    def layers() -> None:
        for weights, (x, routing) in zip(packed, inputs, strict=True):
            run_moe(implementation, weights, spec, gpu, x, routing)

    us = graph_us(layers, repeats) / len(packed)
    used = sum(len(routing.expert_ids.unique()) for _, routing in inputs) / len(inputs)
    num_bytes = used * bytes_per_expert(spec) + activation_bytes(spec)
    unit = implementation.cost(spec, gpu).unit.value
    found = row("moe", case, implementation.name, us, num_bytes, expert_flops(spec), ceilings, error, unit=unit)
    return replace(found, launched=launched[0])
