"""``microscale bench kernels small``: norms, rotation with KV write, router and gates at a range of token counts.

Each op is checked against its reference before it is timed. A graph holds the op many times over, on tensors of its
own each time, so that the replay itself does not count. The same work through torch is timed
next to it, where that is a few calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from microscale.hardware import Gpu
from microscale.kernels.attention.spec import PagedKv
from microscale.kernels.dense.spec import DenseSpec
from microscale.kernels.moe.spec import MoeSpec
from microscale.kernels.small import cost, reference
from microscale.kernels.small.fused import TritonSmall
from microscale.kernels.small.spec import HeadNorms, RopeTable, Router, SmallSpec
from microscale.planning.bound import Small
from microscale.planning.ops import MLP_RUN
from microscale_lab.calls import bind_small
from microscale_lab.kernel_bench.layers import layer_spec
from microscale_lab.kernel_bench.rows import KernelRow, check, counting, row
from microscale_lab.kernel_bench.timing import Ceilings, graph_us, measure_ceilings, present_gpu

if TYPE_CHECKING:
    from torch import Tensor

DEVICE = "cuda"
TOKENS = (1, 8, 64, 1024)
COPIES = 16
PAGE_SIZE = 16
EPSILON = 1e-5
# One rounding to bf16, 1.6e-3 RMS, and sums in another order.
RMS_TOLERANCE = 3.2e-3
PLAIN = ("gpt-oss-120b", "small")
"""Heads that are rotated alone, and a router with a bias."""
NORMED = ("gemma-4-26b-a4b", "small.full")
"""Wide heads that are normed, whose keys and values are one projection; and a dense MLP."""


@dataclass(frozen=True)
class SmallWork:
    """One op on inputs of its own: what ours and the reference compute, what torch takes, and the bytes."""

    name: str
    spec: SmallSpec
    run: Callable[[Small], Tensor]
    torch: Callable[[], object] | None
    num_bytes: int


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def _spec(layer: tuple[str, str], tokens: int) -> SmallSpec:
    return replace(layer_spec(*layer, SmallSpec), tokens=tokens)


def add_rms_norm(tokens: int) -> SmallWork:
    spec = _spec(PLAIN, tokens)
    x, residual, weight = _normal(tokens, spec.hidden), _normal(tokens, spec.hidden), _normal(spec.hidden)

    def by_torch() -> Tensor:
        return F.rms_norm(x + residual, (spec.hidden,), weight, EPSILON)

    num_bytes = cost.add_rms_norm(spec)
    return SmallWork(
        "add_rms_norm", spec, lambda o: o.add_rms_norm(x, residual, weight, EPSILON)[0], by_torch, num_bytes
    )


def add_norm_route(tokens: int) -> SmallWork:
    spec = _spec(PLAIN, tokens)
    x, residual, weight = _normal(tokens, spec.hidden), _normal(tokens, spec.hidden), _normal(spec.hidden)
    router = Router(_normal(spec.num_experts, spec.hidden) * spec.hidden**-0.5, _normal(spec.num_experts))

    def by_torch() -> Tensor:
        normed = F.rms_norm(x + residual, (spec.hidden,), weight, EPSILON)
        return F.linear(normed, router.weight, router.bias).topk(spec.top_k).values.softmax(-1)

    def run(ops: Small) -> Tensor:
        return ops.add_norm_route(x, residual, weight, EPSILON, router, spec.top_k)[0]

    return SmallWork("add_norm_route", spec, run, by_torch, cost.add_norm_route(spec))


def _heads(spec: SmallSpec, norms: HeadNorms | None, shared: bool) -> SmallWork:
    tokens = spec.tokens
    total = spec.num_heads + (1 if shared else 2) * spec.num_kv_heads
    qkv = _normal(tokens, total, spec.head_dim)
    half = spec.head_dim // 2
    table = RopeTable(1.0 / 150000 ** (torch.arange(half, device=DEVICE) / half), 1.0)
    shape = (-(-tokens // PAGE_SIZE), spec.num_kv_heads, PAGE_SIZE, spec.head_dim)
    kv = PagedKv(torch.zeros(shape, device=DEVICE).bfloat16(), torch.zeros(shape, device=DEVICE).bfloat16())
    slots = torch.randperm(shape[0] * PAGE_SIZE, device=DEVICE)[:tokens]
    positions = torch.arange(tokens, device=DEVICE)

    def run(ops: Small) -> Tensor:
        return ops.rope_and_write_kv(qkv, spec.num_heads, positions, table, kv, slots, norms)

    name = "rope_and_write_kv" + ("" if norms is None else ", normed, K = V")
    return SmallWork(name, spec, run, None, cost.rope_and_write_kv(spec))


def heads(tokens: int) -> SmallWork:
    return _heads(_spec(PLAIN, tokens), None, shared=False)


def normed_heads(tokens: int) -> SmallWork:
    spec = _spec(NORMED, tokens)
    return _heads(spec, HeadNorms(_normal(spec.head_dim), _normal(spec.head_dim), EPSILON), shared=True)


def gated(tokens: int) -> SmallWork:
    model, _ = NORMED
    units = layer_spec(model, "mlp.down", DenseSpec).columns
    x = _normal(tokens, 2 * units)
    # As the model has it: the experts' gate, with gates and ups in runs.
    gate = replace(layer_spec(model, "experts", MoeSpec).gate, interleaved=True, run=MLP_RUN)

    def by_torch() -> Tensor:
        g, up = (part.flatten(1) for part in x.view(tokens, -1, 2, gate.run).unbind(2))
        return F.gelu(g, approximate="tanh") * up

    spec = _spec(NORMED, tokens)
    num_bytes = cost.gated(spec, units)
    return SmallWork("gated, gelu", spec, lambda ops: ops.gated(x, gate), by_torch, num_bytes)


WORK = (add_rms_norm, add_norm_route, heads, normed_heads, gated)


def run(tokens: Sequence[int] = TOKENS, repeats: int = 20) -> Iterator[KernelRow]:
    """Rows as they are measured. The first comes after the ceilings, some seconds in."""
    gpu = present_gpu()
    ceilings = measure_ceilings()
    for make in WORK:
        for number in tokens:
            torch.manual_seed(number)
            yield measure([make(number) for _ in range(COPIES)], number, gpu, ceilings, repeats)


def measure(work: Sequence[SmallWork], tokens: int, gpu: Gpu, ceilings: Ceilings, repeats: int) -> KernelRow:
    """One row, checked and timed over all copies of the work."""
    first, entry = work[0], TritonSmall(gpu)
    ops = bind_small(entry, first.spec, gpu)
    case = f"{first.name}, {tokens}"
    with counting(first.name) as launched:
        got = first.run(ops).float()
    want = first.run(bind_small(reference.ReferenceSmall(), first.spec, gpu)).float()
    error = float((got - want).norm() / want.norm())
    check(entry.name, case, gpu.name, error, RMS_TOLERANCE)
    us = graph_us(lambda: [item.run(ops) for item in work], repeats) / len(work)
    other = None
    if first.torch is not None:
        other = graph_us(lambda: [item.torch() for item in work if item.torch is not None], repeats) / len(work)
    found = row("small", case, entry.name, us, first.num_bytes, 0, ceilings, error, other)
    return replace(found, launched=launched[0])
