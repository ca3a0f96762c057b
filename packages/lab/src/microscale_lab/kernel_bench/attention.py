"""``microscale bench kernels attention``: one attention layer over paged KV, decode and prefill.

Each row is checked against the float32 reference before it is timed. A graph holds several layers, each with pages of
its own in random order, so that nothing is read from L2 and the replay itself does not count. Next to it is torch's
SDPA on contiguous keys and values, without sinks, where it can do the same work: bf16 and no window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from microscale.hardware import Gpu
from microscale.kernels.attention.paged import PagedAttention
from microscale.kernels.attention.reference import attention
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, BatchShape, PagedKv
from microscale.models.config import LayerKind
from microscale_lab.calls import run_attention
from microscale_lab.kernel_bench.layers import PAGE_SIZE, layer_spec
from microscale_lab.kernel_bench.rows import KernelRow, check, counting, row
from microscale_lab.kernel_bench.timing import GIB, Ceilings, graph_us, measure_ceilings, present_gpu
from microscale_lab.predict.measured_as import path_name

if TYPE_CHECKING:
    from torch import Tensor

CHECKED_QUERIES = 32
# Weights and outputs round to bf16, 1.6e-3 RMS each, and room for the sums: see tests/kernels/cases_attention.py.
RMS_TOLERANCE = 4.8e-3
# All layers of a graph together: several times any L2, and no more layers than a model has.
ROTATED_BYTES = GIB
MAX_LAYERS = 16


Layer = tuple[str, LayerKind]
"""A preset, and which of its layers."""
SINKS_FULL, SINKS_SLIDING = ("gpt-oss-20b", LayerKind.FULL), ("gpt-oss-20b", LayerKind.SLIDING)
WIDE_FULL, WIDE_SLIDING = ("gemma-4-26b-a4b", LayerKind.FULL), ("gemma-4-26b-a4b", LayerKind.SLIDING)
LAYERS: tuple[Layer, ...] = (SINKS_FULL, SINKS_SLIDING, WIDE_FULL, WIDE_SLIDING)


def spec_of(layer: Layer) -> AttentionSpec:
    """The layer as its model binds it, for one token."""
    model, kind = layer
    return layer_spec(model, kind.value, AttentionSpec)


@dataclass(frozen=True)
class AttentionInput:
    """``sequences`` sequences with ``new`` new tokens each, after which their context is ``context``."""

    layer: Layer
    sequences: int
    context: int
    new: int = 1
    fp8: bool = False
    verify: bool = False
    """The new tokens are drafts."""

    @property
    def name(self) -> str:
        model, kind = self.layer
        work = "decode" if self.new == 1 else f"{'verify' if self.verify else 'prefill'} {self.new}"
        layer = f"{model} {kind.value.partition('_')[0]}"
        return f"{layer}{' fp8' if self.fp8 else ''}, {work}, {self.sequences} x {self.context}"

    @property
    def spec(self) -> AttentionSpec:
        """The layer with this work."""
        return replace(spec_of(self.layer), tokens=self.sequences * self.new, context=self.context)


CASES = (
    *(AttentionInput(SINKS_FULL, n, 8192) for n in (1, 8, 64)),
    *(AttentionInput(SINKS_FULL, n, 131072) for n in (1, 8)),
    AttentionInput(SINKS_FULL, 1, 1024),
    AttentionInput(SINKS_FULL, 8, 8192, fp8=True),
    *(AttentionInput(SINKS_FULL, n, 8192, new=new, verify=True) for n in (1, 8) for new in (2, 4, 8)),
    *(AttentionInput(SINKS_SLIDING, 8, context) for context in (4096, 131072)),
    *(AttentionInput(SINKS_FULL, 1, n, new=n) for n in (2048, 8192)),
    AttentionInput(SINKS_SLIDING, 1, 8192, new=8192),
    AttentionInput(WIDE_FULL, 8, 8192),
    AttentionInput(WIDE_SLIDING, 8, 8192),
    AttentionInput(WIDE_FULL, 1, 8192, new=8192),
)


def visible_pairs(case: AttentionInput) -> int:
    """Pairs of a new token and a position that it sees, over all sequences."""
    window = case.spec.window or case.context
    first = case.context - case.new
    return case.sequences * sum(min(position + 1, window) for position in range(first, case.context))


def read_positions(case: AttentionInput) -> int:
    """Positions of the cache that must be read, over all sequences."""
    window = case.spec.window or case.context
    return case.sequences * min(case.context, case.new - 1 + window)


def count(case: AttentionInput) -> tuple[int, int]:
    """Bytes and operations: keys and values once, queries and outputs; scores and the weighted sum."""
    heads = case.spec
    kv = 2 * read_positions(case) * heads.num_kv_heads * heads.head_dim * (1 if case.fp8 else 2)
    rows = 2 * case.sequences * case.new * heads.num_heads * heads.head_dim * 2
    return kv + rows, 4 * visible_pairs(case) * heads.num_heads * heads.head_dim


def make_batch(case: AttentionInput, generator: torch.Generator, device: str = "cuda") -> AttentionBatch:
    """Pages in random order; sequences share none."""
    pages = -(-case.context // PAGE_SIZE)
    order = torch.randperm(case.sequences * pages, generator=generator, device=device).int()
    starts = torch.arange(case.sequences + 1, device=device, dtype=torch.int32) * case.new
    lens = torch.full((case.sequences,), case.context, device=device, dtype=torch.int32)
    return AttentionBatch(starts, lens, order.view(case.sequences, pages), case.new, case.verify)


def make_kv(case: AttentionInput, generator: torch.Generator, device: str = "cuda") -> PagedKv:
    heads = case.spec
    pages = case.sequences * -(-case.context // PAGE_SIZE)
    shape = (pages, heads.num_kv_heads, PAGE_SIZE, heads.head_dim)

    def cache() -> Tensor:
        numbers = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8) if case.fp8 else numbers

    scales = [torch.ones(heads.num_kv_heads, device=device) if case.fp8 else None for _ in range(2)]
    return PagedKv(cache(), cache(), *scales)


def rms_error(out: Tensor, q: Tensor, kv: PagedKv, batch: AttentionBatch, spec: AttentionSpec, sinks: Tensor) -> float:
    """Against the reference, on the last new tokens of the first and of the last sequence."""
    worst = 0.0
    starts = batch.query_start.tolist()
    for seq in {0, len(starts) - 2}:
        end = starts[seq + 1]
        taken = slice(max(starts[seq], end - CHECKED_QUERIES), end)
        queries = q[taken]
        some = AttentionBatch(
            torch.tensor([0, queries.shape[0]], device=q.device, dtype=torch.int32),
            batch.context_lens[seq : seq + 1],
            batch.page_table[seq : seq + 1],
            queries.shape[0],
        )
        want = attention(queries, kv, some, spec, sinks if spec.sinks else None)
        worst = max(worst, float((out[taken].float() - want).norm() / want.norm()))
    return worst


def run(cases: Sequence[AttentionInput] = CASES, repeats: int = 20) -> Iterator[KernelRow]:
    """Rows as they are measured. The first comes after the ceilings, some seconds in."""
    gpu = present_gpu()
    ceilings = measure_ceilings()
    for case in cases:
        yield measure(case, gpu, ceilings, repeats)
        torch.cuda.empty_cache()


def measure(case: AttentionInput, gpu: Gpu, ceilings: Ceilings, repeats: int = 20) -> KernelRow:
    """One row, checked and timed."""
    generator = torch.Generator("cuda").manual_seed(0)
    spec = case.spec
    num_bytes, flops = count(case)
    layers = max(2, min(MAX_LAYERS, -(-ROTATED_BYTES // num_bytes)))
    caches = [make_kv(case, generator) for _ in range(layers)]
    batch = make_batch(case, generator)
    q = torch.randn(spec.tokens, spec.num_heads, spec.head_dim, device="cuda", generator=generator)
    q = (q * spec.head_dim**-0.5 if spec.scale is not None else q).bfloat16()
    sinks = torch.randn(spec.num_heads, device="cuda", generator=generator).bfloat16()
    implementation = PagedAttention()

    def attend(kv: PagedKv) -> Tensor:
        return run_attention(implementation, spec, gpu, q, kv, batch, sinks if spec.sinks else None)

    shape = replace(spec, batch=BatchShape.of(caches[0], batch))
    with counting(path_name(implementation, case.layer[1].value, shape, gpu)) as launched:
        first = attend(caches[0])
    error = rms_error(first, q, caches[0], batch, spec, sinks)
    check(implementation.name, case.name, gpu.name, error, RMS_TOLERANCE)
    us = graph_us(lambda: [attend(kv) for kv in caches], repeats) / layers
    other = None
    if spec.window is None and not case.fp8:
        caches.clear()
        other = sdpa_us(case, spec, layers, repeats)
    found = row("attention", case.name, implementation.name, us, num_bytes, flops, ceilings, error, other)
    return replace(found, launched=launched[0])


def sdpa_us(case: AttentionInput, spec: AttentionSpec, layers: int, repeats: int) -> float:
    """The same sizes through torch: keys and values of a sequence lie together, and there are no sinks."""
    shape = (case.sequences, spec.num_kv_heads, case.context, spec.head_dim)
    q = torch.randn(case.sequences, spec.num_heads, case.new, spec.head_dim, device="cuda", dtype=torch.bfloat16)
    pairs = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)] for _ in range(layers)]

    def attend() -> None:
        for k, v in pairs:
            F.scaled_dot_product_attention(q, k, v, is_causal=case.new > 1, scale=spec.scale, enable_gqa=True)

    return graph_us(attend, repeats) / layers
