"""``microscale bench kernels moe``: one expert layer at a range of token counts.

Each row is checked against the float32 reference on a sample of tokens before it is timed. Weights rotate over several
layers, so that none is read from L2; a layer is gather, both GEMMs with bias and activation and the weighted sum, with
routing given as expert ids and weights: sorting the pairs is inside the figure. Times are of CUDA-graph replays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from microscale.bench.timing import Ceilings, graph_us, measure_ceilings
from microscale.errors import MicroscaleError, Unsupported
from microscale.formats import BlockScaled, block_format
from microscale.hardware import Gpu, detect
from microscale.kernels.moe.cost import activation_bytes, bytes_per_expert, expert_flops
from microscale.kernels.moe.packed import PackedExperts
from microscale.kernels.moe.reference import moe
from microscale.kernels.moe.spec import Activations, Gate, GateKind, MoeSpec, MoeWeights, Routing
from microscale.kernels.moe.w4a16 import TritonW4A16
from microscale.kernels.moe.w8a16 import TritonW8A16

TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 2048, 8192)
CHECKED_TOKENS = 24
MEMORY_BOUND_TOKENS = 512
# Three roundings to bf16, of 1.6e-3 RMS each, on the way: see tests/gpu/test_moe.py.
RMS_TOLERANCE = 4.8e-3


class WrongResult(MicroscaleError):
    """A kernel's answer is not the reference's: no figure is printed for it."""


@dataclass(frozen=True)
class Layer:
    """The expert layer of a known model."""

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    weight_format: str
    gate: Gate
    bias: bool

    def spec(self, tokens: int) -> MoeSpec:
        sizes = (self.num_experts, self.top_k, self.hidden, self.intermediate)
        return MoeSpec(*sizes, self.weight_format, Activations.BF16, self.gate, self.bias, tokens)


_SWIGLU = Gate(GateKind.SWIGLU_CLAMPED, interleaved=True)
_GELU = Gate(GateKind.GELU_TANH, interleaved=False)
LAYERS = {
    "gpt-oss-120b": Layer(128, 4, 2880, 2880, "mxfp4", _SWIGLU, bias=True),
    "gpt-oss-20b": Layer(32, 4, 2880, 2880, "mxfp4", _SWIGLU, bias=True),
    "gemma-4-26b-a4b": Layer(128, 8, 2816, 704, "mxfp8", _GELU, bias=False),
}
_IMPLEMENTATIONS = {"mxfp4": TritonW4A16(), "mxfp8": TritonW8A16()}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    model: str
    implementation: str
    tokens: int
    us: float
    gbs: float
    tflops: float
    floor_us: float
    percent_of_ceiling: float
    rms_error: float


def _random(shape: tuple[int, int, int], fmt_name: str, generator: torch.Generator) -> BlockScaled:
    """Weights of about unit gain: every code is as likely as any other, scales vary over four octaves."""
    fmt = block_format(fmt_name)
    experts, rows, k = shape
    # 0x7F would be NaN in E4M3; the top exponents are left out so that both formats have like magnitudes.
    high = 256 if fmt.bits == 4 else 0x48

    def random_bytes(low: int, high: int, width: int) -> Tensor:
        return torch.randint(low, high, (experts, rows, width), dtype=torch.uint8, device="cuda", generator=generator)

    return BlockScaled(random_bytes(0, high, k * fmt.bits // 8), random_bytes(117, 121, k // 32), fmt)


def _weights(layer: Layer, generator: torch.Generator) -> MoeWeights:
    experts, hidden, units = layer.num_experts, layer.hidden, layer.intermediate

    def bias(rows: int) -> Tensor | None:
        if not layer.bias:
            return None
        return torch.randn(experts, rows, device="cuda", generator=generator).mul(0.1).bfloat16()

    gate_up = _random((experts, 2 * units, hidden), layer.weight_format, generator)
    down = _random((experts, hidden, units), layer.weight_format, generator)
    return MoeWeights(gate_up, down, bias(2 * units), bias(hidden))


def _inputs(layer: Layer, tokens: int, generator: torch.Generator) -> tuple[Tensor, Routing]:
    logits = torch.randn(tokens, layer.num_experts, device="cuda", generator=generator)
    values, ids = logits.topk(layer.top_k, dim=-1)
    x = torch.randn(tokens, layer.hidden, device="cuda", generator=generator).bfloat16()
    return x, Routing(ids.int().contiguous(), values.softmax(dim=-1).contiguous())


def _rms_error(y: Tensor, x: Tensor, routing: Routing, weights: MoeWeights, gate: Gate) -> float:
    """Relative RMS error on a sample of tokens."""
    sample = torch.randperm(x.shape[0], device="cuda")[:CHECKED_TOKENS]
    some = Routing(routing.expert_ids[sample].contiguous(), routing.weights[sample].contiguous())
    want = moe(x[sample], weights, some, gate)
    return float((y[sample].float() - want).norm() / want.norm())


def run(
    model: str = "gpt-oss-120b", tokens: Sequence[int] = TOKENS, num_layers: int = 5, repeats: int = 20
) -> Iterator[Row]:
    """Rows as they are measured. The first comes after the ceilings, some seconds in."""
    gpu = detect()
    if gpu.is_cpu:
        raise Unsupported("Kernel benchmarks need a GPU; `microscale prove` checks the kernels without one.")
    if model not in LAYERS:
        raise Unsupported(f"Unknown expert layer {model!r}; known are {', '.join(LAYERS)}.")
    layer = LAYERS[model]
    implementation = _IMPLEMENTATIONS[layer.weight_format]
    ceilings = measure_ceilings()
    generator = torch.Generator("cuda").manual_seed(0)
    checked = _weights(layer, generator)
    packed = [implementation.pack(checked, layer.spec(1))]
    packed += [implementation.pack(_weights(layer, generator), layer.spec(1)) for _ in range(num_layers - 1)]
    for count in tokens:
        inputs = [_inputs(layer, count, generator) for _ in packed]
        yield _measure(model, layer, implementation, packed, inputs, checked, ceilings, repeats, gpu)


def _measure(
    model: str,
    layer: Layer,
    implementation: TritonW4A16,
    packed: list[PackedExperts],
    inputs: list[tuple[Tensor, Routing]],
    checked: MoeWeights,
    ceilings: Ceilings,
    repeats: int,
    gpu: Gpu,
) -> Row:
    x, routing = inputs[0]
    spec = layer.spec(x.shape[0])
    error = _rms_error(implementation.run(packed[0], spec, gpu, x, routing), x, routing, checked, layer.gate)
    if not error <= RMS_TOLERANCE:
        raise WrongResult(
            f"{implementation.name} is off by {error:.1e} (allowed {RMS_TOLERANCE:.1e}) at {spec.tokens} tokens "
            f"on {gpu.name}."
        )

    def layers() -> None:
        for weights, (x, routing) in zip(packed, inputs, strict=True):
            implementation.run(weights, spec, gpu, x, routing)

    us = graph_us(layers, repeats) / len(packed)
    used = sum(len(routing.expert_ids.unique()) for _, routing in inputs) / len(inputs)
    num_bytes = used * bytes_per_expert(spec) + activation_bytes(spec)
    flops = expert_flops(spec)
    floor = ceilings.floor_us(num_bytes, flops)
    rates = (num_bytes / us / 1e3, flops / us / 1e6)
    return Row(model, implementation.name, spec.tokens, us, *rates, floor, 100 * floor / us, error)


def table(rows: Sequence[Row]) -> str:
    """The rows as text: GB/s where memory is the limit, TFLOP/s where arithmetic is."""
    lines = [f"{'tokens':>7} {'us':>9} {'floor':>8} {'rate':>14} {'of ceiling':>11} {'error':>9}"]
    for row in rows:
        few = row.tokens <= MEMORY_BOUND_TOKENS
        rate = f"{row.gbs:.0f} GB/s" if few else f"{row.tflops:.0f} TFLOP/s"
        line = f"{row.tokens:>7} {row.us:>9.1f} {row.floor_us:>8.1f} {rate:>14} {row.percent_of_ceiling:>10.0f}% "
        lines.append(line + f"{row.rms_error:>9.1e}")
    return "\n".join(lines)


def as_json(rows: Sequence[Row]) -> list[dict[str, object]]:
    return [asdict(row) for row in rows]
