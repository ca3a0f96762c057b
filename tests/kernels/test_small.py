"""The small ops against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from microscale import hardware
from microscale.kernels.attention.spec import PagedKv
from microscale.kernels.op import Activations
from microscale.kernels.small import cost
from microscale.kernels.small.fused import TritonSmall
from microscale.kernels.small.reference import ReferenceSmall, rms_norm, rope, rope_and_write_kv, route, write_kv
from microscale.kernels.small.spec import RopeTable, SmallSpec
from support.interpreter import run_cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 48, generator=generator).to(dtype) * 3, torch.randn(48, generator=generator).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    y = rms_norm(x, weight, 1e-5)
    assert y.dtype == dtype
    torch.testing.assert_close(
        y.double(), exact.to(dtype).double(), rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6
    )


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5), torch.zeros(2, 8))


def test_rope_rotates_pairs() -> None:
    table = RopeTable(torch.tensor([1.0, 0.25]), scale=1.5)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    y = rope(x, torch.tensor([7]), table)[0, 0]
    for i, frequency in enumerate([1.0, 0.25]):
        angle = 7 * frequency
        a, b = x[0, 0, i].item(), x[0, 0, i + 2].item()
        assert y[i].item() == pytest.approx(1.5 * (a * math.cos(angle) - b * math.sin(angle)), rel=1e-5)
        assert y[i + 2].item() == pytest.approx(1.5 * (b * math.cos(angle) + a * math.sin(angle)), rel=1e-5)


def test_rope_keeps_the_product_of_equal_distances() -> None:
    """What rotary positions are for: the score depends on the distance alone."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 1, 16, generator=generator) for _ in range(2))
    table = RopeTable(1.0 / 100 ** (torch.arange(8) / 8), 1.0)

    def score(query: int, key: int) -> float:
        return float((rope(q, torch.tensor([query]), table) * rope(k, torch.tensor([key]), table)).sum())

    assert score(10, 3) == pytest.approx(score(107, 100), abs=1e-4)


def test_write_kv_touches_its_slots_and_no_other() -> None:
    kv = PagedKv(torch.zeros(4, 2, 8, 3), torch.zeros(4, 2, 8, 3))
    k, v = torch.randn(3, 2, 3), torch.randn(3, 2, 3)
    slots = torch.tensor([31, 0, 13])
    write_kv(k, v, kv, slots)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(kv.k[slot // 8, :, slot % 8], k[token])
        assert torch.equal(kv.v[slot // 8, :, slot % 8], v[token])
    assert torch.count_nonzero(kv.k) == torch.count_nonzero(k)


def test_rope_and_write_kv_is_its_parts() -> None:
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(5, 4 + 2 * 2, 8, generator=generator)
    table = RopeTable(torch.rand(4, generator=generator), 1.25)
    positions, slots = torch.arange(5) + 3, torch.arange(5) * 3
    kv, parts = (PagedKv(torch.zeros(4, 2, 4, 8), torch.zeros(4, 2, 4, 8)) for _ in range(2))
    q = rope_and_write_kv(qkv, 4, positions, table, kv, slots)
    write_kv(rope(qkv[:, 4:6], positions, table), qkv[:, 6:], parts, slots)
    assert torch.equal(q, rope(qkv[:, :4], positions, table))
    assert torch.equal(kv.k, parts.k)
    assert torch.equal(kv.v, parts.v)


def test_route_softmaxes_over_the_chosen() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    routing = route(logits, 2)
    assert routing.expert_ids.tolist() == [[1, 3]]
    assert routing.weights[0, 0].item() == pytest.approx(1 / (1 + math.exp(-1.0)))
    assert routing.weights.sum().item() == pytest.approx(1.0)


@pytest.mark.slow
def test_triton_under_the_interpreter() -> None:
    run_cases("cases_small.py", beside=__file__)


def test_triton_refuses_with_a_reason() -> None:
    def reason(**change: object) -> str:
        sizes = {"hidden": 2880, "num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "num_experts": 128, "top_k": 4}
        spec = SmallSpec(**(sizes | {"activations": Activations.BF16, "tokens": 1} | change))  # type: ignore[arg-type]
        return TritonSmall().supports(spec, hardware.known("gb10")) or ""

    assert reason() == ""
    assert "float32" in reason(activations=Activations.FLOAT32)
    assert "20000" in reason(hidden=20000)
    assert "48" in reason(head_dim=48)
    assert "600" in reason(num_experts=600)


def test_costs() -> None:
    spec = SmallSpec(2880, 64, 8, 64, 128, 4, Activations.BF16, tokens=3)
    assert cost.rms_norm(spec) == (3 + 3 + 1) * 2880 * 2
    assert cost.rope(spec) == 2 * 3 * 72 * 64 * 2
    assert cost.write_kv(spec) == 2 * (2 * 3 * 8 * 64 * 2)
    assert cost.route(spec) == 3 * (128 + 8) * 4
    assert cost.rope_and_write_kv(spec) == 2 * 3 * 80 * 64 * 2
    assert cost.per_layer(spec) == 2 * cost.rms_norm(spec) + cost.rope_and_write_kv(spec) + cost.route(spec)
    assert ReferenceSmall().supports(spec, hardware.cpu()) is None
