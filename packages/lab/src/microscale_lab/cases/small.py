"""Cases of the small ops: norms and sums, routers behind them, gates, rotation and the KV write."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from microscale.formats import decode
from microscale.hardware import Gpu
from microscale.kernels.attention.spec import PagedKv
from microscale.kernels.moe.spec import Gate, GateKind, Parts, Routing
from microscale.kernels.op import Activations, Reason
from microscale.kernels.small import reference
from microscale.kernels.small.spec import HeadNorms, NormAddNorm, RopeTable, Router, RouterShape, SmallOps, SmallSpec
from microscale.planning import registry
from microscale.planning.paths import PathList, ask, path_of
from microscale_lab.calls import bind_small
from microscale_lab.cases.case import Compared, Finish, KernelCase, compare, just_written, picked, same
from microscale_lab.cases.errors import Errors, rms_step, spread, step
from microscale_lab.cases.fused_attention import hold_cache

if TYPE_CHECKING:
    from torch import Tensor


def normal(*shape: int, device: str, seed: int = 0, size: float = 1.0) -> Tensor:
    """bf16 numbers on the device."""
    return (size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16().to(device)


def small_spec(width: int, experts: int = 8, top_k: int = 2, tokens: int = 1) -> SmallSpec:
    return SmallSpec(width, 8, 2, 64, experts, top_k, Activations.BF16, tokens)


def bf16_bound(expected: Tensor) -> Errors:
    """Both compute in float32 from the same bf16 and round once. ``worst`` counts the largest element with its size."""
    return Errors(2 * step("bf16") * spread(expected), 2 * rms_step("bf16"))


def norm_of_sum_bound(expected: Tensor) -> Errors:
    """The norm of a sum that was itself rounded, perhaps otherwise."""
    return Errors(4 * step("bf16") * spread(expected), 3 * rms_step("bf16"))


def e4m3_bound(expected: Tensor) -> Errors:
    """One rounding to E4M3; what lies between 448 and 512 times the block's scale saturates, by up to two steps."""
    return Errors(2 * step("e4m3") * spread(expected), 2 * rms_step("e4m3"))


def hold_routing(actual: Routing, logits: Tensor, top_k: int, room: float, scale: Tensor | None) -> Iterator[Compared]:
    """The experts that the logits name. Logits within ``room`` of each other may change places."""
    want = reference.route(logits, top_k, scale)
    chosen, exact = logits.gather(1, actual.expert_ids.long()), logits.gather(1, want.expert_ids.long())
    size = float(logits.square().mean().sqrt())
    ours, theirs = (values.sort(descending=True).values for values in (chosen, exact))
    yield compare("logits of the experts", ours, theirs, Errors(2 * room / size, 2 * room / size))
    alike = (actual.expert_ids == want.expert_ids).all(dim=1)
    got, exact = actual.weights[alike], want.weights[alike]
    yield compare("weights", got, exact, Errors(4 * room * spread(exact), 4 * room))


ROUTED_FORMS = {"add_norm_route": PathList.ROUTE, "norm_add_norm_route": PathList.NORM_ADD_NORM_ROUTE}
IN_ONE_LAUNCH = "router in one launch"
Build = Callable[[SmallOps, Gpu, str], Finish]


@dataclass(frozen=True)
class SmallCase(KernelCase):
    title: str
    spec: SmallSpec
    build: Build

    op: ClassVar[str] = "small"

    def variant(self, gpu: Gpu) -> str:
        entry = registry.small("triton_small")
        form = ROUTED_FORMS.get(self.title)
        return picked(entry, self.title, ask(entry, form, self.spec, gpu).path if form else None)

    def refuses(self, gpu: Gpu) -> Reason | None:
        return registry.small("triton_small").supports(self.spec, gpu)

    def start(self, gpu: Gpu, device: str) -> Finish:
        return self.build(registry.small("triton_small").on(gpu), gpu, device)


def norm(tokens: int, width: int, weighted: bool) -> Build:
    def build(ops: SmallOps, gpu: Gpu, device: str) -> Finish:
        padded = torch.full((tokens, width + 16), math.nan, device=device).bfloat16()
        padded[:, :width] = normal(tokens, width, device=device, size=5.0)
        x, weight = padded[:, :width], normal(width, device=device, seed=1) if weighted else None
        just_written(x)
        y = ops.rms_norm(x, weight, 1e-5)

        def finish() -> Iterator[Compared]:
            want = reference.rms_norm(x, weight, 1e-5)
            yield compare("norm", y, want, bf16_bound(want))

        return finish

    return build


def add_norm(tokens: int, width: int, mxfp8: bool) -> Build:
    def build(ops: SmallOps, gpu: Gpu, device: str) -> Finish:
        x, residual = normal(tokens, width, device=device, seed=1), normal(tokens, width, device=device, seed=2)
        weight = normal(width, device=device, seed=3)
        weight[:32] = 0.0  # a block of zeros
        just_written(x, residual)
        coded, total = ops.add_rms_norm_mxfp8(x, residual, weight, 1e-5) if mxfp8 else (None, None)
        normed, plain_total = ops.add_rms_norm(x, residual, weight, 1e-5)

        def finish() -> Iterator[Compared]:
            want, want_total = reference.add_rms_norm(x, residual, weight, 1e-5)
            yield compare("norm", normed, want, bf16_bound(want))
            yield same("sum", plain_total, want_total)
            if coded is not None and total is not None:
                yield same("sum next to MXFP8", total, want_total)
                yield compare("norm in MXFP8", decode(coded), want.float(), e4m3_bound(want))

        return finish

    return build


def add_norm_of_parts(tokens: int, width: int, top_k: int) -> Build:
    """What a token's experts answered: the sum and both norms are those of the answer, bit for bit."""

    def build(ops: SmallOps, gpu: Gpu, device: str) -> Finish:
        rows = torch.randn(tokens * top_k, width, generator=torch.Generator().manual_seed(1)).to(device)
        parts, residual = Parts(rows, top_k), normal(tokens, width, device=device, seed=2)
        weight = normal(width, device=device, seed=3)
        just_written(rows, residual)
        x = parts.summed(residual.dtype)
        normed, total = ops.add_rms_norm(parts, residual, weight, 1e-5)
        coded, coded_total = ops.add_rms_norm_mxfp8(parts, residual, weight, 1e-5)
        alike, _ = ops.add_rms_norm(x, residual, weight, 1e-5)
        coded_alike, _ = ops.add_rms_norm_mxfp8(x, residual, weight, 1e-5)

        def finish() -> Iterator[Compared]:
            yield same("sum", total, x + residual)
            yield same("sum next to MXFP8", coded_total, x + residual)
            yield same("norm", normed, alike)
            yield same("codes", coded.values, coded_alike.values)
            yield same("scales", coded.scales, coded_alike.scales)

        return finish

    return build


def norm_add_norm(tokens: int, width: int, readers: int, join: bool) -> Build:
    def build(ops: SmallOps, gpu: Gpu, device: str) -> Finish:
        x, other, residual = (normal(tokens, width, device=device, seed=i, size=3.0) for i in range(3))
        weights = [1 + normal(width, device=device, seed=i, size=0.1) for i in range(3, 6)]
        after = 1 + normal(readers, width, device=device, seed=6, size=0.1)
        around = NormAddNorm(weights[0], after, 1e-6, scale=0.75)
        if join:
            around = NormAddNorm(weights[0], after, 1e-6, 0.75, before_other=weights[1], joined=weights[2])
        given = (x, other if join else None, residual, around)
        just_written(*given[:3])
        got, got_sum = ops.norm_add_norm(*given)

        def finish() -> Iterator[Compared]:
            want, want_sum = reference.norm_add_norm(*given)
            yield compare("sum", got_sum, want_sum, bf16_bound(want_sum))
            yield compare("norms", got, want, norm_of_sum_bound(want))

        return finish

    return build


def add_norm_route(spec: SmallSpec) -> Build:
    def build(ops: SmallOps, gpu: Gpu, device: str) -> Finish:
        tokens, width, experts, top_k = spec.tokens, spec.hidden, spec.num_experts, spec.top_k
        x, residual = normal(tokens, width, device=device, size=5.0), normal(tokens, width, device=device, seed=4)
        always = spec.router is not None and spec.router.always
        weight = normal(width, device=device, seed=1)
        weight = weight.float() if always else weight  # the family with such an expert has its norms in float32
        bias = normal(experts, device=device, seed=3) if spec.router and spec.router.bias else None
        router = Router(normal(experts, width, device=device, seed=2, size=width**-0.5), bias, always=always)
        bound = bind_small(ops, spec, gpu)
        fused = path_of(ops, PathList.ROUTE, spec, gpu).name == IN_ONE_LAUNCH
        just_written(x, residual)
        for _ in range(2):  # the second call finds the counters as the first left them
            normed, total, routing = bound.add_norm_route(x, residual, weight, 1e-5, router, top_k)

        def finish() -> Iterator[Compared]:
            want, want_total, _ = reference.add_norm_route(x, residual, weight, 1e-5, router, top_k)
            yield compare("norm", normed, want, bf16_bound(want))
            yield same("sum", total, want_total)
            # Of our own norm: what differs is the order of float32 sums, or one rounding of the logits.
            logits = normed.float() @ router.weight.float().T
            logits = logits if bias is None else logits + bias.float()
            room = float(logits.abs().max()) * (1e-5 if fused else step("bf16"))
            if not always:
                yield from hold_routing(routing, logits, top_k, room, None)
                return
            chosen = Routing(routing.expert_ids[:, :-1].contiguous(), routing.weights[:, :-1].contiguous())
            yield from hold_routing(chosen, logits[:, :-1].contiguous(), top_k - 1, room, None)
            yield same(
                "the last expert", routing.expert_ids[:, -1], torch.full_like(routing.expert_ids[:, -1], experts - 1)
            )
            weight_room = Errors(4 * room, 4 * room)
            yield compare("its weight", routing.weights[:, -1], torch.sigmoid(logits[:, -1]), weight_room)

        return finish

    return build


def norm_add_norm_route(spec: SmallSpec) -> Build:
    def build(ops: SmallOps, gpu: Gpu, device: str) -> Finish:
        tokens, width, experts, top_k = spec.tokens, spec.hidden, spec.num_experts, spec.top_k
        x, residual = normal(tokens, width, device=device, size=3.0), normal(tokens, width, device=device, seed=4)
        after = 1 + normal(3, width, device=device, seed=6, size=0.1)
        around = NormAddNorm(1 + normal(width, device=device, size=0.1), after, 1e-6, scale=0.75)
        scale = (1 + normal(experts, device=device, seed=7, size=0.2)).float()
        router = Router(normal(experts, width, device=device, seed=2, size=width**-0.5), expert_scale=scale)
        bound = bind_small(ops, spec, gpu)
        fused = path_of(ops, PathList.NORM_ADD_NORM_ROUTE, spec, gpu).name == IN_ONE_LAUNCH
        just_written(x, residual)
        for _ in range(2):
            normed, total, routing = bound.norm_add_norm_route(x, residual, around, router, top_k)

        def finish() -> Iterator[Compared]:
            want, want_total = reference.norm_add_norm(x, None, residual, around)
            yield compare("sum", total, want_total, bf16_bound(want_total))
            yield compare("norms", normed, want[:-1], norm_of_sum_bound(want[:-1]))
            # The router's own norm is not given back, and one rounding of the sum may have moved it.
            logits = want[-1].float() @ router.weight.float().T
            room = float(logits.abs().max()) * (step("bf16") if fused else 2 * step("bf16"))
            yield from hold_routing(routing, logits, top_k, room, scale)

        return finish

    return build


def gate_heads(tokens: int, heads: int, head_dim: int) -> Build:
    """Gates are the last heads of wider rows."""

    def build(ops: SmallOps, gpu: Gpu, device: str) -> Finish:
        x = normal(tokens, heads, head_dim, device=device)
        gates = normal(tokens, 3 * heads, head_dim, device=device, seed=1, size=4.0)[:, 2 * heads :]
        gates[0, 0, 0] = -300.0
        just_written(x, gates)
        y = ops.gate_heads(x, gates)

        def finish() -> Iterator[Compared]:
            want = reference.gate_heads(x, gates)
            yield compare("y", y, want, bf16_bound(want))

        return finish

    return build


def gated(tokens: int, units: int, gate: Gate) -> Build:
    def build(ops: SmallOps, gpu: Gpu, device: str) -> Finish:
        x = normal(tokens, 2 * units, device=device, size=6.0)
        x[0, 0] = -300.0  # far down both gates are 0, not NaN
        just_written(x)
        y = ops.gated(x, gate)

        def finish() -> Iterator[Compared]:
            want = reference.gated(x, gate)
            yield compare("y", y, want, bf16_bound(want))

        return finish

    return build


Heads = tuple[int, int, int, int, str, bool, bool, float]
HEADS: list[Heads] = [
    # tokens, heads, kv_heads, head_dim, what is normed, shared, fp8, turning part
    (2, 16, 2, 512, "qkv", True, False, 0.25),
    (3, 16, 8, 256, "qkv", False, True, 1.0),
    (1, 9, 3, 64, "", False, True, 1.0),
    (2, 4, 1, 64, "qkv", True, True, 0.5),
    (2, 32, 4, 128, "qk", False, False, 1.0),
    (3, 9, 3, 64, "qk", False, True, 1.0),
    (2, 4, 1, 64, "qk", True, False, 1.0),
    (5, 4, 2, 32, "", False, False, 1.0),
]


def rope(heads: Heads) -> Build:
    def build(ops: SmallOps, gpu: Gpu, device: str) -> Finish:
        tokens, num_heads, kv_heads, dim, norm, shared, fp8, part = heads
        qkv = normal(tokens, num_heads + (1 if shared else 2) * kv_heads, dim, device=device, size=3.0)
        if not shared:
            qkv[:, -kv_heads:, ::2] *= 2.0**-11  # values whose quotients lie among E4M3's smallest numbers
        frequencies = 1.0 / 1e4 ** (torch.arange(dim // 2) / (dim // 2))
        frequencies[int(part * dim) // 2 :] = 0.0
        q_weight, k_weight = (1 + normal(dim, device=device, seed=seed, size=0.2) for seed in (1, 2))
        norms = HeadNorms(q_weight, k_weight, 1e-6, values=norm == "qkv") if norm else None
        positions, slots = torch.arange(tokens).to(device) + 70, torch.arange(tokens).to(device) * 9 + 4
        ours, exact = (empty_cache(2, kv_heads, 32, dim, fp8, device) for _ in range(2))
        table = RopeTable(frequencies.to(device), 1.0)
        just_written(qkv)
        q = ops.rope_and_write_kv(qkv, num_heads, positions, table, ours, slots, norms)

        def finish() -> Iterator[Compared]:
            want = reference.rope_and_write_kv(qkv, num_heads, positions, table, exact, slots, norms)
            yield compare("queries", q, want, bf16_bound(want))
            yield from hold_cache(ours, exact, slots)
            if norm != "qkv":
                yield same("values that are only copied or divided", ours.v, exact.v)

        return finish

    return build


def empty_cache(pages: int, kv_heads: int, page_size: int, dim: int, fp8: bool, device: str) -> PagedKv:
    """Filled with values that no kernel writes; the scales of E4M3 let the last head saturate."""
    shape = (pages, kv_heads, page_size, dim)
    if not fp8:
        k, v = (torch.full(shape, -7.0, device=device).bfloat16() for _ in "kv")
        return PagedKv(k, v)
    k, v = (torch.full(shape, 0x7F, dtype=torch.uint8, device=device) for _ in "kv")
    return PagedKv(k, v, torch.linspace(0.02, 0.001, kv_heads).to(device), torch.full((kv_heads,), 0.05, device=device))


# tokens, width, experts, top_k, bias, whether the last expert always runs
ROUTED = [
    (1, 2880, 128, 4, True, False),
    (3, 2880, 32, 4, True, False),
    (2, 64, 8, 4, True, False),
    (2, 2048, 128, 8, False, False),
    (1, 2080, 5, 4, True, False),  # the last program has fewer experts than the others
    (2, 2048, 257, 9, False, True),
]
NORM_ADD_NORM_SHAPES = [(1, 2816, 128), (3, 2100, 100), (17, 64, 128)]


def cases() -> Iterator[KernelCase]:
    for tokens, width in ((1, 32), (3, 160), (2, 704), (1, 2816), (3, 2880)):
        spec, name = small_spec(width), f"{tokens} x {width}"
        yield SmallCase(name, "rms_norm", spec, norm(tokens, width, weighted=width != 704))
        yield SmallCase(name, "add_rms_norm", spec, add_norm(tokens, width, mxfp8=width in (160, 2880)))
    for tokens, width, top_k in ((3, 2880, 4), (2, 2048, 8), (5, 160, 3)):
        name = f"{tokens} x {width}, the sum of {top_k} parts"
        yield SmallCase(name, "add_rms_norm", small_spec(width), add_norm_of_parts(tokens, width, top_k))
    for tokens, width, readers, join in ((3, 704, 3, False), (1, 2816, 1, True)):
        name = f"{tokens} x {width}, {readers} readers{', two parts' if join else ''}"
        yield SmallCase(name, "norm_add_norm", small_spec(width), norm_add_norm(tokens, width, readers, join))
    for tokens, width, experts, top_k, bias, always in ROUTED:
        sizes = (width, 8, 2, 64, experts, top_k, Activations.BF16, tokens)
        spec = SmallSpec(*sizes, RouterShape(bias, expert_scale=False, always=always))
        yield SmallCase(f"{tokens} x {width}, {experts} experts", "add_norm_route", spec, add_norm_route(spec))
    for tokens, width, experts in NORM_ADD_NORM_SHAPES:
        sizes = (width, 8, 2, 64, experts, 8, Activations.BF16, tokens)
        spec = SmallSpec(*sizes, RouterShape(False, expert_scale=True, readers=2))
        yield SmallCase(
            f"{tokens} x {width}, {experts} experts", "norm_add_norm_route", spec, norm_add_norm_route(spec)
        )
    for kind in GateKind:
        for run in (0, 1, 8):
            gate = Gate(kind, interleaved=run > 0, run=max(run, 1))
            yield SmallCase(f"{kind}, runs of {run}", "gated", small_spec(64), gated(3, 40, gate))
    yield SmallCase("5 heads", "gate_heads", small_spec(64), gate_heads(3, 5, 256))
    yield SmallCase("2112 units", "gated", small_spec(64), gated(1, 2112, Gate(GateKind.SILU, interleaved=False)))
    for heads in HEADS:
        yield SmallCase(f"heads {heads}", "rope_and_write_kv", small_spec(64), rope(heads))
