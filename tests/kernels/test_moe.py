"""The expert layer's reference against an independent formula, and the dequantized implementation against it."""

from __future__ import annotations

import math

import pytest
import torch

from microscale import hardware
from microscale.errors import Unsupported
from microscale.formats import MXFP4, MXFP8, BlockFormat, decode, encode
from microscale.kernels.moe.cost import bytes_per_expert, expected_experts, expert_flops, expert_weight_bytes
from microscale.kernels.moe.dequantized import DequantizedMoe
from microscale.kernels.moe.reference import ReferenceMoe, apply_gate, moe
from microscale.kernels.moe.spec import Activations, Gate, GateKind, MoeSpec, MoeWeights, Routing
from microscale_lab.calls import run_moe

SWIGLU = Gate(GateKind.SWIGLU_CLAMPED, interleaved=True)
SWIGLU_HALVES = Gate(GateKind.SWIGLU_CLAMPED, interleaved=False)
GELU = Gate(GateKind.GELU_TANH, interleaved=False)
SILU = Gate(GateKind.SILU, interleaved=False)


def make_weights(experts: int, hidden: int, intermediate: int, fmt: BlockFormat, bias: bool, seed: int) -> MoeWeights:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return MoeWeights(
        encode(normal(experts, 2 * intermediate, hidden) * 0.3, fmt),
        encode(normal(experts, hidden, intermediate) * 0.3, fmt),
        normal(experts, 2 * intermediate).bfloat16() if bias else None,
        normal(experts, hidden).bfloat16() if bias else None,
    )


def make_routing(tokens: int, experts: int, top_k: int, seed: int) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    values, ids = torch.randn(tokens, experts, generator=generator).topk(top_k, dim=-1)
    return Routing(ids.int(), torch.softmax(values, dim=-1))


def by_formula(x: torch.Tensor, weights: MoeWeights, routing: Routing, gate: Gate) -> torch.Tensor:
    """Token by token, expert by expert, unit by unit, in float64 from the contract's text."""
    gate_up, down = decode(weights.gate_up, torch.float64), decode(weights.down, torch.float64)
    units = gate_up.shape[1] // 2
    y = torch.zeros_like(x, dtype=torch.float64)
    for t in range(x.shape[0]):
        for slot, e in enumerate(routing.expert_ids[t].tolist()):
            h = gate_up[e] @ x[t].double()
            if weights.gate_up_bias is not None:
                h += weights.gate_up_bias[e].double()
            a = torch.zeros(units, dtype=torch.float64)
            for u in range(units):
                at_gate, at_up = (2 * u, 2 * u + 1) if gate.interleaved else (u, units + u)
                g, up = float(h[at_gate]), float(h[at_up])
                if gate.kind is GateKind.GELU_TANH:
                    inner = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
                    a[u] = 0.5 * g * (1 + math.tanh(inner)) * up
                elif gate.kind is GateKind.SILU:
                    a[u] = g / (1 + math.exp(-g)) * up
                else:
                    g, up = min(g, gate.limit), max(-gate.limit, min(up, gate.limit))
                    a[u] = (up + 1) * g / (1 + math.exp(-gate.alpha * g))
            out = down[e] @ a
            if weights.down_bias is not None:
                out += weights.down_bias[e].double()
            y[t] += routing.weights[t, slot].double() * out
    return y


MoeCase = tuple[int, int, int, int, int, BlockFormat, Gate, bool]
CASES: list[MoeCase] = [
    # experts, top_k, hidden, intermediate, tokens, format, gate, bias
    (4, 2, 64, 32, 5, MXFP4, SWIGLU, True),
    (4, 2, 64, 32, 5, MXFP4, SWIGLU, False),
    (8, 8, 32, 96, 3, MXFP4, SWIGLU_HALVES, True),
    (3, 1, 96, 64, 7, MXFP8, GELU, False),
    (5, 4, 160, 32, 1, MXFP8, GELU, True),
    (6, 3, 64, 96, 4, MXFP4, SILU, False),
    (4, 2, 64, 32, 0, MXFP4, SWIGLU, True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"e{c[0]}k{c[1]}h{c[2]}i{c[3]}t{c[4]}-{c[5].name}-{c[6].kind}")
def test_reference_is_the_formula(case: MoeCase) -> None:
    experts, top_k, hidden, intermediate, tokens, fmt, gate, bias = case
    weights = make_weights(experts, hidden, intermediate, fmt, bias, seed=1)
    routing = make_routing(tokens, experts, top_k, seed=2)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(3)) * 2
    y = moe(x, weights, routing, gate)
    # float32 sums of a few hundred terms of size up to ~1e3.
    torch.testing.assert_close(y.double(), by_formula(x, weights, routing, gate), rtol=1e-4, atol=1e-3)


def spec_for(weights: MoeWeights, activations: Activations, gate: Gate, top_k: int, tokens: int) -> MoeSpec:
    experts, rows, hidden = weights.gate_up.shape
    return MoeSpec(
        experts,
        top_k,
        hidden,
        rows // 2,
        weights.gate_up.format.name,
        activations,
        gate,
        weights.down_bias is not None,
        tokens,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"e{c[0]}k{c[1]}h{c[2]}i{c[3]}t{c[4]}-{c[5].name}-{c[6].kind}")
def test_dequantized_in_float32_equals_the_reference(case: MoeCase) -> None:
    experts, top_k, hidden, intermediate, tokens, fmt, gate, bias = case
    weights = make_weights(experts, hidden, intermediate, fmt, bias, seed=4)
    routing = make_routing(tokens, experts, top_k, seed=5)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(6))
    spec = spec_for(weights, Activations.FLOAT32, gate, top_k, tokens)
    fast, slow = DequantizedMoe(), ReferenceMoe()
    assert fast.supports(spec, hardware.cpu()) is None
    y = run_moe(fast, fast.pack(weights, spec), spec, hardware.cpu(), x, routing)
    torch.testing.assert_close(
        y, run_moe(slow, slow.pack(weights, spec), spec, hardware.cpu(), x, routing), rtol=1e-5, atol=1e-4
    )


def test_dequantized_in_bfloat16_is_within_its_step() -> None:
    weights = make_weights(4, 64, 64, MXFP4, True, seed=7)
    routing = make_routing(16, 4, 2, seed=8)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(9)).bfloat16()
    spec = spec_for(weights, Activations.BF16, SWIGLU, 2, 16)
    y = run_moe(DequantizedMoe(), DequantizedMoe().pack(weights, spec), spec, hardware.cpu(), x, routing)
    assert y.dtype == torch.bfloat16
    truth = moe(x, weights, routing, SWIGLU)
    # Three roundings to bfloat16 (h, a, y), each half a step of 2**-8, add up in the worst case.
    assert (y.float() - truth).norm() / truth.norm() < 3 * 2**-8


def test_gate_clamps() -> None:
    h = torch.tensor([100.0, 100.0, -100.0, -100.0, 1.0, 0.0])
    out = apply_gate(h, SWIGLU)
    assert out[0] == pytest.approx(8 * 7 / (1 + math.exp(-1.702 * 7)))
    assert out[1] == pytest.approx(0.0, abs=1e-6)
    assert out[2] == pytest.approx(1 / (1 + math.exp(-1.702)))


def test_cost_of_gpt_oss_120b_layer() -> None:
    spec = MoeSpec(128, 4, 2880, 2880, "mxfp4", Activations.BF16, SWIGLU, True, tokens=1)
    assert bytes_per_expert(spec) == 3 * 2880 * 90 * 17 + 3 * 2880 * 2
    assert expert_weight_bytes(spec) == 4 * bytes_per_expert(spec)
    assert expert_flops(spec) == 2 * 4 * 3 * 2880 * 2880
    many = MoeSpec(128, 4, 2880, 2880, "mxfp4", Activations.BF16, SWIGLU, True, tokens=8192)
    assert expected_experts(many) == pytest.approx(128)


def test_refusals() -> None:
    spec = MoeSpec(4, 2, 64, 64, "int4", Activations.BF16, SWIGLU, True, tokens=1)
    mx = MoeSpec(4, 2, 64, 64, "mxfp4", Activations.MXFP8, SWIGLU, True, tokens=1)
    four_bits = MoeSpec(4, 2, 64, 64, "mxfp4", Activations.NVFP4, SWIGLU, True, tokens=1)
    for implementation in (ReferenceMoe(), DequantizedMoe()):
        assert "not int4" in (implementation.supports(spec, hardware.cpu()) or "")
        assert "mxfp8" in (implementation.supports(mx, hardware.known("h200")) or "")
        assert "nvfp4" in (implementation.supports(four_bits, hardware.cpu()) or "")
    # On a CPU the reference rounds activations as kernels do, where there is one for these weights.
    assert ReferenceMoe().supports(mx, hardware.cpu()) is None
    weights = make_weights(2, 64, 32, MXFP4, True, seed=0)
    with pytest.raises(Unsupported, match="not one expert layer"):
        MoeWeights(weights.gate_up, weights.gate_up)
    with pytest.raises(Unsupported, match="both biases or none"):
        MoeWeights(weights.gate_up, weights.down, weights.gate_up_bias, None)
    with pytest.raises(Unsupported, match="int32 and float32"):
        Routing(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2))
