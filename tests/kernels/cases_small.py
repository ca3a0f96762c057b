"""The small ops in Triton against their references. Runs under the interpreter, or on a GPU where there is one."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from microscale import hardware
from microscale.formats import BlockScaled, decode
from microscale.kernels.attention.spec import PagedKv
from microscale.kernels.moe.small_batch import combine
from microscale.kernels.moe.spec import Gate, GateKind, Parts
from microscale.kernels.op import Activations
from microscale.kernels.small import reference
from microscale.kernels.small.fused import TritonSmall
from microscale.kernels.small.spec import HeadNorms, NormAddNorm, RopeTable, Router, RouterShape, SmallSpec
from microscale.planning.bound import Small
from microscale.planning.paths import PathList, path_of
from microscale_lab.calls import bind_small
from microscale_lab.cases import small as cases
from microscale_lab.cases.case import hold
from microscale_lab.cases.errors import Errors, assert_close, step
from microscale_lab.cases.small import HEADS

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
GPU = hardware.detect() if ON_GPU else hardware.known("gb10")
SMALL = TritonSmall(GPU)


def routed(x: torch.Tensor, router: Router, top_k: int) -> Small:
    """The ops of a model of these sizes."""
    sizes = SmallSpec(x.shape[1], 8, 2, 64, router.weight.shape[0], top_k, Activations.BF16, tokens=1)
    return bind_small(TritonSmall(), sizes, GPU)


normal = partial(cases.normal, device=DEVICE)


def within(actual: torch.Tensor, expected: torch.Tensor, bound: Errors) -> None:
    assert_close(actual, expected, worst=bound.worst, rms=bound.rms)


def bf16_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    within(actual, expected, cases.bf16_bound(expected))


def check(build: cases.Build) -> None:
    hold(build(SMALL, GPU, DEVICE)())


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("width", [32, 160, 704, 2816, 2880])
def test_rms_norm(tokens: int, width: int) -> None:
    check(cases.norm(tokens, width, weighted=True))


def test_rms_norm_of_nothing_and_of_zeros() -> None:
    weight = torch.ones(64, dtype=torch.bfloat16, device=DEVICE)
    assert SMALL.rms_norm(torch.empty(0, 64, dtype=torch.bfloat16, device=DEVICE), weight, 1e-5).shape == (
        0,
        64,
    )
    zeros = torch.zeros(2, 64, dtype=torch.bfloat16, device=DEVICE)
    assert torch.equal(SMALL.rms_norm(zeros, weight, 1e-5), zeros)


def test_rms_norm_without_a_weight() -> None:
    check(cases.norm(3, 512, weighted=False))


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("width", [32, 704, 2880])
def test_add_rms_norm(tokens: int, width: int) -> None:
    padded = torch.full((tokens, width + 16), math.nan, device=DEVICE).bfloat16()
    padded[:, :width] = normal(tokens, width, seed=1)
    x, residual, weight = padded[:, :width], normal(tokens, width, seed=2, size=30.0), normal(width, seed=3)
    normed, total = SMALL.add_rms_norm(x, residual, weight, 1e-5)
    want, want_total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, want_total)
    if tokens:
        bf16_close(normed, want)


@pytest.mark.parametrize("width", [64, 2816, 2880])
def test_add_rms_norm_mxfp8(width: int) -> None:
    """The same codes as the norm and the encoder one after the other, but where the norm itself rounds otherwise."""
    x, residual, weight = normal(4, width, seed=1), normal(4, width, seed=2), normal(width, seed=3)
    weight[:32] = 0.0  # a block of zeros
    x[2, 40] = math.nan
    got, total = SMALL.add_rms_norm_mxfp8(x, residual, weight, 1e-5)
    want, want_total = reference.add_rms_norm_mxfp8(x, residual, weight, 1e-5)
    assert isinstance(got, BlockScaled)
    assert torch.equal(total.isnan(), want_total.isnan())
    clean = [0, 1, 3]
    assert torch.equal(total[clean], want_total[clean])
    assert (got.scales[2] == 255).all()
    assert not decode(got)[clean, :32].any()
    same = (got.values == want.values)[clean]
    assert float(same.float().mean()) > 0.98
    numbers, exact = decode(got)[clean], reference.add_rms_norm(x, residual, weight, 1e-5)[0][clean]
    within(numbers, exact, cases.e4m3_bound(exact))


def summed(parts: Parts) -> torch.Tensor:
    """A launch of its own on a GPU. The interpreter cuts bf16 off where that launch rounds."""
    if not ON_GPU:
        return parts.summed(torch.bfloat16)
    y = torch.empty(len(parts.rows) // parts.top_k, parts.rows.shape[1], dtype=torch.bfloat16, device=DEVICE)
    combine(parts.rows, y, parts.top_k, GPU)
    return y


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Also of zeros with a sign."""
    return torch.equal(actual.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize(
    ("tokens", "width", "top_k"),
    [(3, 2880, 4), (64, 2880, 4), (5, 2048, 8), (4, 256, 4), (7, 704, 3), (1, 96, 1), (2, 1056, 16)],
)
def test_add_rms_norm_of_parts(tokens: int, width: int, top_k: int) -> None:
    """The bits of the sum over experts and the norm one after the other."""
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(tokens * top_k, width, generator=generator)
    if top_k > 2:  # in another order the others are lost in these two
        rows[::top_k, :8], rows[1::top_k, :8] = 3e8, -3e8
    rows[:, 8:16] = -0.0
    padded = torch.full((tokens, width + 16), math.nan, device=DEVICE).bfloat16()
    padded[:, :width] = normal(tokens, width, seed=2)
    padded[:, 8:12] = -0.0
    residual, weight, parts = padded[:, :width], normal(width, seed=3), Parts(rows.to(DEVICE), top_k)
    x = summed(parts)
    normed, total = SMALL.add_rms_norm(parts, residual, weight, 1e-5)
    want, want_total = SMALL.add_rms_norm(x, residual, weight, 1e-5)
    assert same_bits(total, want_total)
    assert same_bits(want_total, reference.add_rms_norm(parts, residual, weight, 1e-5)[1])
    assert same_bits(normed, want)
    if width % 32 == 0:
        codes, coded_total = SMALL.add_rms_norm_mxfp8(parts, residual, weight, 1e-5)
        want_codes, _ = SMALL.add_rms_norm_mxfp8(x, residual, weight, 1e-5)
        assert same_bits(coded_total, want_total)
        assert torch.equal(codes.values, want_codes.values)
        assert torch.equal(codes.scales, want_codes.scales)


def test_add_rms_norm_of_no_parts() -> None:
    parts = Parts(torch.empty(0, 64, device=DEVICE), 4)
    normed, total = SMALL.add_rms_norm(parts, normal(0, 64), normal(64), 1e-5)
    assert normed.shape == total.shape == (0, 64)


@pytest.mark.parametrize(("tokens", "width", "readers", "join"), [(3, 704, 3, False), (1, 2816, 1, True)])
def test_norm_add_norm(tokens: int, width: int, readers: int, join: bool) -> None:
    check(cases.norm_add_norm(tokens, width, readers, join))


def test_norm_add_norm_of_nothing() -> None:
    around = NormAddNorm(normal(64), normal(2, 64), 1e-6, before_other=normal(64), joined=normal(64))
    x = normal(0, 64)
    normed, total = SMALL.norm_add_norm(x, x, x, around)
    assert (normed.shape, total.shape) == ((2, 0, 64), (0, 64))


@pytest.mark.parametrize(
    ("tokens", "width", "experts", "fused"), [(1, 2816, 128, True), (3, 2100, 100, True), (17, 64, 128, False)]
)
def test_norm_add_norm_route(tokens: int, width: int, experts: int, fused: bool) -> None:
    x, residual, before = normal(tokens, width, size=3.0), normal(tokens, width, seed=4), 1 + normal(width, size=0.1)
    around = NormAddNorm(before, 1 + normal(3, width, seed=6, size=0.1), 1e-6, scale=0.75)
    scale = (1 + normal(experts, seed=7, size=0.2)).float()
    router = Router(normal(experts, width, seed=2, size=width**-0.5), expert_scale=scale)
    for _ in range(2):  # the second call finds the counters as the first left them
        normed, total, routing = routed(x, router, 8).norm_add_norm_route(x, residual, around, router, 8)
    # Sum and norms are those of the op without a router: to the bit, where a sum's order does not depend on the warps.
    want, want_total = SMALL.norm_add_norm(x, None, residual, around)
    if ON_GPU and fused:
        bf16_close(total, want_total)
        within(normed, want[:2], cases.norm_of_sum_bound(want))
    else:
        assert torch.equal(total, want_total)
        assert torch.equal(normed, want[:2])
    logits = want[2].float() @ router.weight.float().T
    exact = reference.route(logits, 8, scale)
    room = float(logits.abs().max()) * (1e-5 if fused else step("bf16"))
    chosen = logits.gather(1, routing.expert_ids.long())
    assert ((chosen.sort(descending=True).values - logits.topk(8).values).abs() <= 2 * room).all()
    same = (routing.expert_ids == exact.expert_ids).all(dim=1)
    assert same.any()
    torch.testing.assert_close(routing.weights[same], exact.weights[same], rtol=4 * room, atol=0)


def test_ties_and_nan_behind_a_sum() -> None:
    """Among equal logits the lowest experts win, in order; a token with a NaN gets NaN weights, and ids in range."""
    x, residual = normal(2, 2112, size=3.0), normal(2, 2112, seed=4)
    x[1, 7] = math.nan
    ones = torch.ones(3, 2112, dtype=torch.bfloat16, device=DEVICE)
    scale = torch.arange(1, 129, dtype=torch.float32, device=DEVICE)
    router = Router(torch.zeros(128, 2112, dtype=torch.bfloat16, device=DEVICE), expert_scale=scale)
    _, _, routing = routed(x, router, 8).norm_add_norm_route(x, residual, NormAddNorm(ones[0], ones, 1e-6), router, 8)
    assert routing.expert_ids[0].tolist() == list(range(8))
    torch.testing.assert_close(routing.weights[0], scale[:8] / 8)
    assert routing.weights[1].isnan().all()
    assert sorted(set(routing.expert_ids[1].tolist())) == list(range(8))


@pytest.mark.parametrize(
    ("tokens", "width", "experts", "top_k", "bias", "fused"),
    [
        (1, 2880, 128, 4, True, True),
        (3, 2880, 32, 4, True, True),
        (2, 2816, 50, 4, True, True),
        (2, 64, 8, 4, True, False),
        (17, 2880, 32, 4, True, False),
        (2, 2048, 128, 8, False, True),
        (3, 1100, 100, 8, False, True),
        (17, 2048, 128, 8, False, False),
    ],
)
def test_add_norm_route(tokens: int, width: int, experts: int, top_k: int, bias: bool, fused: bool) -> None:
    sizes = (width, 8, 2, 64, experts, top_k, Activations.BF16, tokens)
    spec = SmallSpec(*sizes, RouterShape(bias, expert_scale=False))
    assert (path_of(SMALL, PathList.ROUTE, spec, GPU).name == cases.IN_ONE_LAUNCH) == fused
    check(cases.add_norm_route(spec))


@pytest.mark.parametrize("kind", list(GateKind))
@pytest.mark.parametrize("run", [0, 1, 8])
def test_gated(kind: GateKind, run: int) -> None:
    gate = Gate(kind, interleaved=run > 0, run=max(run, 1))
    assert SMALL.gated(normal(0, 64), gate).shape == (0, 32)
    for tokens, units in ((1, 2112), (3, 40)):
        check(cases.gated(tokens, units, gate))


def test_route_with_scales() -> None:
    logits, scale = normal(5, 24), 0.5 + torch.rand(24, device=DEVICE)
    logits = logits.float() + torch.arange(24, device=DEVICE) * 1e-3  # no ties: torch.topk leaves those open
    got, want = SMALL.route(logits, 8, scale), reference.route(logits, 8, scale)
    assert torch.equal(got.expert_ids, want.expert_ids)
    torch.testing.assert_close(got.weights, want.weights, rtol=32 * step("float32"), atol=0)


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "page_size"),
    [
        (1, 64, 8, 64, 16),
        (5, 4, 2, 32, 16),
        (3, 6, 3, 128, 1),
        (2, 16, 2, 512, 32),
        (4, 9, 1, 64, 128),
        (0, 4, 2, 64, 16),
    ],
)
def test_rope_and_write_kv(tokens: int, heads: int, kv_heads: int, head_dim: int, page_size: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator).bfloat16().to(DEVICE)
    table = RopeTable((1.0 / 150000 ** (torch.arange(head_dim // 2) / (head_dim // 2))).to(DEVICE), 1.3466)
    positions = torch.randint(0, 4000, (tokens,), generator=generator).to(DEVICE)
    pages = 3 + tokens // page_size
    slots = torch.randperm(pages * page_size, generator=generator)[:tokens].to(DEVICE)
    shape = (pages, kv_heads, page_size, head_dim)
    ours, theirs = (PagedKv(*(torch.full(shape, -7.0).bfloat16().to(DEVICE) for _ in range(2))) for _ in range(2))
    q = SMALL.rope_and_write_kv(qkv, heads, positions, table, ours, slots)
    want = reference.rope_and_write_kv(qkv, heads, positions, table, theirs, slots)
    assert q.shape == (tokens, heads, head_dim)
    if tokens:
        bf16_close(q, want)
        bf16_close(ours.k, theirs.k)
    assert torch.equal(ours.v, theirs.v)
    untouched = theirs.k == -7.0
    assert torch.equal(ours.k[untouched], theirs.k[untouched])


@pytest.mark.parametrize("case", HEADS, ids=str)
def test_heads_normed_shared_and_in_fp8(case: tuple[int, int, int, int, str, bool, bool, float]) -> None:
    tokens, heads, kv_heads, dim, norm, shared, fp8, part = case
    qkv = normal(tokens, heads + (1 if shared else 2) * kv_heads, dim, size=3.0)
    frequencies = 1.0 / 1e4 ** (torch.arange(dim // 2) / (dim // 2))
    frequencies[int(part * dim) // 2 :] = 0.0
    table = RopeTable(frequencies.to(DEVICE), 1.0)
    weights = (1 + normal(dim, seed=1, size=0.2), 1 + normal(dim, seed=2, size=0.2))
    norms = HeadNorms(*weights, 1e-6, values=norm == "qkv") if norm else None
    positions, slots = torch.arange(tokens).to(DEVICE) + 70, torch.arange(tokens).to(DEVICE) * 9 + 4
    caches = [cases.empty_cache(2, kv_heads, 32, dim, fp8, DEVICE) for _ in range(2)]
    q = SMALL.rope_and_write_kv(qkv, heads, positions, table, caches[0], slots, norms)
    bf16_close(q, reference.rope_and_write_kv(qkv, heads, positions, table, caches[1], slots, norms))
    kept = caches[1].v[slots // 32, :, slots % 32]
    if shared and norm == "qkv" and not fp8:
        # What Gemma 4 does: the value is the plain norm, whatever the key's weight and position.
        assert torch.equal(kept, reference.rms_norm(qkv[:, heads:], None, 1e-6))
    if norm == "qk" and not fp8:  # Qwen3: the value is what was projected
        assert torch.equal(kept, qkv[:, -kv_heads:])
    for got, want in ((caches[0].k, caches[1].k), (caches[0].v, caches[1].v)):
        if fp8:
            # A key rounds to bf16 and then to E4M3: where the first differs by a step, so may the second.
            distance = (got.int() - want.int()).abs()
            assert int(distance.max()) <= 1
            assert float((distance == 0).float().mean()) > 0.99
            assert (got == 0x7F).sum() == 2 * kv_heads * 32 * dim - tokens * kv_heads * dim  # no NaN was written
        else:
            bf16_close(got, want)
    if fp8 and not norm:
        assert ((caches[0].k & 0x7F) == 0x7E).any()  # 448


@pytest.mark.skipif(not ON_GPU, reason="angles of 131072 radians: the interpreter uses numpy's cosine, not the GPU's")
def test_rope_far_out() -> None:
    """cos and sin of large angles: float32 angles are exact to 2**-8 there, and the reduction must be as good."""
    positions = torch.tensor([131071, 100003], device=DEVICE)
    qkv = torch.randn(2, 10, 64, device=DEVICE).bfloat16()
    table = RopeTable((1.0 / 150000 ** (torch.arange(32, device=DEVICE) / 32)), 1.3466)
    kv = PagedKv(*(torch.zeros(1, 1, 16, 64, device=DEVICE).bfloat16() for _ in range(2)))
    slots = torch.tensor([0, 1], device=DEVICE)
    bf16_close(
        SMALL.rope_and_write_kv(qkv, 8, positions, table, kv, slots),
        reference.rope_and_write_kv(qkv, 8, positions, table, kv, slots),
    )
