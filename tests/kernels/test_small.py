"""The small ops against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import Gemma4TextConfig, Qwen3_5MoeTextConfig
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter

from microscale import hardware
from microscale.formats import decode
from microscale.kernels.attention.spec import PagedKv
from microscale.kernels.moe.reference import apply_gate
from microscale.kernels.moe.spec import Gate, GateKind, Parts
from microscale.kernels.op import Activations
from microscale.kernels.small import cost
from microscale.kernels.small.fused import TritonSmall
from microscale.kernels.small.reference import (
    ReferenceSmall,
    add_norm_route,
    add_rms_norm,
    add_rms_norm_mxfp8,
    gate_heads,
    gated,
    norm_add_norm,
    norm_add_norm_route,
    rms_norm,
    rope,
    rope_and_write_kv,
    route,
    write_kv,
)
from microscale.kernels.small.spec import HeadNorms, NormAddNorm, RopeTable, Router, SmallSpec
from support.interpreter import run_cases, thirds_and_all


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


def test_sums_with_their_norms() -> None:
    x, residual, weight = (torch.randn(n, 64, generator=torch.Generator().manual_seed(n)) for n in (3, 3, 1))
    normed, total = add_rms_norm(x, residual, weight[0], 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight[0], 1e-5))
    codes, same_total = add_rms_norm_mxfp8(x, residual, weight[0], 1e-5)
    assert torch.equal(same_total, total)
    # Half a step, and a whole one where the largest of a block saturates.
    torch.testing.assert_close(decode(codes), normed, rtol=2**-3, atol=2**-6)
    router = Router(torch.randn(8, 64), torch.randn(8))
    routed, _, routing = add_norm_route(x, residual, weight[0], 1e-5, router, 2)
    assert torch.equal(routed, normed)
    assert router.bias is not None
    assert torch.equal(routing.expert_ids, route(normed @ router.weight.T + router.bias, 2).expert_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_added_up_in_their_order_and_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3 * 4, 64, generator=generator)
    rows[::4], rows[1::4] = 3e8, -3e8  # from the other end the others are lost in them
    residual, weight = (torch.randn(n, 64, generator=generator).to(dtype) for n in (3, 1))
    a, b, c, d = rows.view(3, 4, 64).unbind(1)
    x = (a + b + c + d).to(dtype)
    assert not torch.equal(x, (d + c + b + a).to(dtype))
    normed, total = add_rms_norm(Parts(rows, 4), residual, weight[0], 1e-5)
    want, want_total = add_rms_norm(x, residual, weight[0], 1e-5)
    assert total.dtype == normed.dtype == dtype
    assert torch.equal(total, want_total)
    assert torch.equal(normed, want)
    codes, coded_total = add_rms_norm_mxfp8(Parts(rows, 4), residual, weight[0], 1e-5)
    assert torch.equal(coded_total, want_total)
    assert torch.equal(codes.values, add_rms_norm_mxfp8(x, residual, weight[0], 1e-5)[0].values)
    # A sum that begins with 0.0 has no negative zero.
    zeros = Parts(torch.full((4, 64), -0.0), 4)
    assert not add_rms_norm(zeros, torch.full((1, 64), -0.0).to(dtype), weight[0], 1e-5)[1].signbit().any()


def test_gated_is_the_experts_gate() -> None:
    x = torch.randn(3, 20) * 5
    for gate in (Gate(kind, interleaved) for kind in GateKind for interleaved in (False, True)):
        assert torch.equal(gated(x, gate), apply_gate(x, gate))


def test_the_second_kind_of_router_scales_its_experts() -> None:
    logits, scale = torch.tensor([[0.0, 3.0, 1.0, 2.0]]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert torch.equal(route(logits, 2, scale).weights, route(logits, 2).weights * torch.tensor([[2.0, 4.0]]))


GEMMA = Gemma4TextConfig(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
    layer_types=["sliding_attention", "full_attention"], sliding_window=8, enable_moe_block=True, num_experts=8,
    top_k_experts=2, moe_intermediate_size=32, num_kv_shared_layers=0, hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=64,
)  # fmt: skip


def test_heads_are_gemmas_own() -> None:
    """K = V, norms, partial rotation and the order of all three, against transformers' full-attention layer."""
    torch.manual_seed(0)
    layer = gemma4.Gemma4TextAttention(GEMMA, layer_idx=1).float()
    assert layer.v_proj is None
    for norm in (layer.q_norm, layer.k_norm):
        torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    rotary = gemma4.Gemma4TextRotaryEmbedding(GEMMA)
    x, positions = torch.randn(1, 5, 64), torch.arange(5) + 100
    angles = rotary(x, positions[None], "full_attention")
    cached: list[torch.Tensor] = []

    class Cache:
        def update(self, k: torch.Tensor, v: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
            cached.extend((k, v))
            return k, v

    with torch.no_grad():
        layer(x, angles, None, {}, Cache())
        q = gemma4.apply_rotary_pos_emb(layer.q_norm(layer.q_proj(x).view(1, 5, 4, 32)), *angles, unsqueeze_dim=2)
        qkv = torch.cat((layer.q_proj(x).view(5, 4, 32), layer.k_proj(x).view(5, 1, 32)), dim=1)
        table = RopeTable(rotary.full_attention_inv_freq, 1.0)
        kv = PagedKv(torch.zeros(1, 1, 8, 32), torch.zeros(1, 1, 8, 32))
        norms = HeadNorms(layer.q_norm.weight, layer.k_norm.weight, GEMMA.rms_norm_eps)
        ours = rope_and_write_kv(qkv, 4, positions, table, kv, torch.arange(5), norms)
    torch.testing.assert_close(ours, q[0])
    torch.testing.assert_close(kv.k[0, :, :5], cached[0][0])
    torch.testing.assert_close(kv.v[0, :, :5], cached[1][0])
    assert not torch.equal(kv.k, kv.v)
    assert (table.inverse_frequencies == 0).any()


def test_norms_around_a_sum_are_gemmas_own() -> None:
    """Both places of a decoder layer where it norms, adds and norms again, with the layers between them left out."""
    torch.manual_seed(0)
    layer = gemma4.Gemma4TextDecoderLayer(GEMMA, layer_idx=1).float()
    for norm in (m for m in layer.modules() if isinstance(m, gemma4.Gemma4RMSNorm) and m.with_scale):
        torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    attended, residual, dense, experts = (torch.randn(3, 64) for _ in range(4))
    with torch.no_grad():
        total = residual + layer.post_attention_layernorm(attended)
        after = torch.stack((layer.pre_feedforward_layernorm.weight, layer.pre_feedforward_layernorm_2.weight))
        normed, ours = norm_add_norm(
            attended, None, residual, NormAddNorm(layer.post_attention_layernorm.weight, after, GEMMA.rms_norm_eps)
        )
        torch.testing.assert_close(ours, total)
        torch.testing.assert_close(normed[0], layer.pre_feedforward_layernorm(total))
        torch.testing.assert_close(normed[1], layer.pre_feedforward_layernorm_2(total))
        joined = layer.post_feedforward_layernorm_1(dense) + layer.post_feedforward_layernorm_2(experts)
        end = (total + layer.post_feedforward_layernorm(joined)) * 0.7
        around = NormAddNorm(
            layer.post_feedforward_layernorm_1.weight,
            layer.input_layernorm.weight[None],
            GEMMA.rms_norm_eps,
            0.7,
            layer.post_feedforward_layernorm_2.weight,
            layer.post_feedforward_layernorm.weight,
        )
        normed, ours = norm_add_norm(dense, experts, total, around)
        torch.testing.assert_close(ours, end)
        torch.testing.assert_close(normed[0], layer.input_layernorm(end))


def test_the_router_behind_a_sum_is_gemmas_own() -> None:
    """A plain norm, a scale of its own, a root of the width, softmax over all, top-k, renormalised, scaled again."""
    torch.manual_seed(1)
    config = Gemma4TextConfig(hidden_size=64, num_experts=6, top_k_experts=3)
    router = gemma4.Gemma4TextRouter(config).float()
    for weight in (router.scale, router.per_expert_scale, router.proj.weight):
        torch.nn.init.normal_(weight, 1.0, 0.5)
    x, residual, before, other = (torch.randn(*shape) for shape in ((5, 64), (5, 64), (64,), (64,)))
    after = torch.stack((other, router.scale.detach() * 64**-0.5))
    around = NormAddNorm(before, after, config.rms_norm_eps)
    ours = Router(router.proj.weight.detach(), expert_scale=router.per_expert_scale.detach())
    with torch.no_grad():
        (normed,), total, routing = norm_add_norm_route(x, residual, around, ours, 3)
        _, weights, ids = router(total)
    want, want_total = norm_add_norm(x, None, residual, around)
    assert torch.equal(normed, want[0])
    assert torch.equal(total, want_total)
    assert torch.equal(routing.expert_ids.long(), ids)
    torch.testing.assert_close(routing.weights, weights)


@pytest.mark.slow
@thirds_and_all
def test_triton_under_the_interpreter(which: str) -> None:
    run_cases("cases_small.py", which, beside=__file__)


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
    assert cost.rope_and_write_kv(spec) == 2 * 3 * 80 * 64 * 2
    assert cost.add_rms_norm(spec) == (4 * 3 + 1) * 2880 * 2
    assert cost.add_norm_route(spec) == cost.add_rms_norm(spec) + 128 * 2881 * 2 + 3 * 4 * 8
    assert cost.gated(spec, 2112) == 3 * 3 * 2112 * 2
    parts = (cost.add_rms_norm, cost.rope_and_write_kv, cost.add_norm_route)
    assert cost.per_layer(spec) == sum(part(spec) for part in parts)
    assert ReferenceSmall().supports(spec, hardware.cpu()) is None


def test_the_router_with_an_expert_that_always_runs_is_qwens_own() -> None:
    """Softmax over the routed experts, top-k, renormalised; the shared one by the sigmoid of its own gate."""
    torch.manual_seed(2)
    config = Qwen3_5MoeTextConfig(hidden_size=64, num_experts=6, num_experts_per_tok=3)
    router = Qwen3_5MoeTopKRouter(config).float()
    torch.nn.init.normal_(router.weight)
    x, gate = torch.randn(5, 64), torch.randn(1, 64)
    with torch.no_grad():
        _, weights, ids = router(x)
        found = route(x @ torch.cat((router.weight, gate)).T, 4, always=True)
    assert torch.equal(found.expert_ids[:, :3].long(), ids)
    torch.testing.assert_close(found.weights[:, :3], weights)
    assert found.expert_ids[:, 3].tolist() == [6] * 5
    torch.testing.assert_close(found.weights[:, 3:], torch.sigmoid(x @ gate.T))


def test_gates_of_heads() -> None:
    attended, gates = torch.tensor([[[2.0, 4.0], [6.0, -8.0]]]), torch.tensor([[[0.0, 100.0], [-100.0, 0.0]]])
    torch.testing.assert_close(gate_heads(attended, gates), torch.tensor([[1.0, 4.0, 0.0, -4.0]]))
