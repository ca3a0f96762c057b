"""Cases of ``attention`` over pages: decode, prefill and mixed batches by every way to share keys among programs.

Inputs are bf16 in both, so what differs is the rounding of the softmax's weights to bf16 before they meet the values,
of the output to bf16, and sums in another order. Slots that no query may see hold NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from microscale.hardware import Gpu
from microscale.kernels.attention.op import AttentionOp
from microscale.kernels.attention.reference import attention
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, BatchShape, PagedKv
from microscale.kernels.op import Activations
from microscale.planning import registry
from microscale.planning.paths import PathList, path_of
from microscale_lab.cases.case import Compared, Finish, KernelCase, OracleCase, compare, just_written, same
from microscale_lab.cases.errors import Errors, rms_step, spread, step

Batch = tuple[AttentionSpec, Tensor, PagedKv, AttentionBatch]
"""Layer, queries, cache, and which query belongs to whom."""
Shape = tuple[int, int, int, int | None, int, list[tuple[int, int]]]
"""Heads, KV heads, head_dim, window, page size, and the (cached, new) tokens of each sequence."""


SHAPES: list[Shape] = [
    # heads, kv_heads, dim, window, page_size, [(cached, new), …]
    (8, 1, 64, None, 16, [(0, 1)]),
    (8, 1, 64, None, 16, [(300, 1), (0, 1), (17, 1), (64, 1)]),
    (16, 2, 64, 128, 32, [(700, 1), (127, 1), (128, 1), (5, 1)]),
    (4, 4, 64, 1, 16, [(90, 1), (3, 1)]),
    (6, 2, 64, 7, 16, [(40, 1), (6, 1), (7, 1)]),
    (8, 1, 64, None, 16, [(0, 37)]),
    (16, 2, 64, 7, 16, [(0, 50), (33, 20), (100, 1), (0, 1)]),
    (4, 2, 64, 128, 64, [(0, 200), (150, 30)]),
    (10, 2, 64, None, 128, [(130, 5), (0, 3), (7, 1)]),
    (2, 1, 128, 40, 16, [(70, 9), (200, 1)]),
    (4, 2, 256, None, 16, [(20, 3), (50, 1)]),
    (8, 1, 512, 30, 16, [(33, 1), (12, 1)]),
    (16, 1, 64, 20, 16, [(10, 30), (0, 0), (25, 4)]),
    (8, 1, 64, None, 64, [(2600, 1), (0, 0), (700, 2), (90, 2)]),  # splits of several sequences; two rows of tokens
    (3, 1, 256, 700, 16, [(800, 1), (90, 2), (0, 1), (0, 0)]),  # the last program adds up nine splits, three rows
    (8, 1, 64, None, 16, [(1900, 1), (700, 2), (255, 1), (0, 0)]),  # the same: up to seven splits, eight rows
    (8, 1, 64, 5000, 16, [(600, 1), (0, 40), (520, 2)]),  # a window longer than any sequence; short and long together
    (8, 1, 64, None, 64, [(8800, 1), (3, 1)]),  # more splits than one step of their sum has
    (8, 1, 64, None, 16, [(2600, 1), *((7 * n % 40, 1) for n in range(40))]),  # more sequences than a warp has lanes
    (8, 1, 64, 20, 16, [(20 + n, 1) for n in range(64)]),  # a window that begins at every place of a block
    (8, 1, 64, None, 16, [(2600, 1), (0, 20)]),  # splits next to a prompt
    # 512 query rows of a KV head and more: FP8 keys and values are copied to bf16 first.
    (32, 2, 64, None, 16, [(32, 33)]),  # one position behind a block of the copy
    (16, 1, 64, None, 16, [(15, 33)]),  # and the table's last page is full
    (16, 1, 64, 20, 32, [(100, 40), (0, 0), (300, 1), (65, 4)]),
    (16, 1, 64, None, 16, [(0, 32), (2600, 1)]),
    (16, 1, 64, None, 64, [(600, 1), (70, 34)]),
    (16, 1, 128, 40, 16, [(70, 33), (3, 1)]),
    (16, 1, 256, 30, 16, [(50, 33)]),
    (16, 1, 512, None, 16, [(10, 32)]),
]
"""Small ones: for interpreters too."""
DRAFTED: list[Shape] = [
    (8, 1, 64, None, 16, [(300, 4), (0, 1), (17, 3), (90, 0), (64, 2)]),  # blocks of 32 rows
    (8, 1, 64, None, 64, [(2600, 8), (700, 1), (90, 5), (0, 0)]),  # of 64; splits of several sequences
    (16, 2, 64, 7, 16, [(40, 8), (6, 3), (7, 1)]),
    (8, 1, 64, None, 16, [(1900, 3), (700, 4), (255, 1)]),  # the last program adds up the splits
    (8, 1, 128, 40, 16, [(70, 7), (200, 1)]),
    (8, 2, 256, None, 16, [(20, 6), (50, 1)]),
    (4, 2, 256, 170, 16, [(180, 16), (90, 2), (0, 1)]),
    (8, 1, 512, 30, 16, [(33, 4), (12, 1)]),
    (8, 1, 512, None, 16, [(40, 7), (3, 2)]),
    (8, 1, 64, 20, 16, [(100, 16), (40, 2)]),  # more rows than a block has: as prompts
]
"""Sequences that decode with drafts. Small ones."""
LARGE_DRAFTED: list[Shape] = [
    (64, 8, 64, None, 16, [(8000, 4), (131000, 8), (1, 1)]),
    (64, 8, 64, 128, 64, [(131000, 3), (4095, 1)]),
    (64, 8, 64, None, 16, [(100 + 7 * n, 1 + n % 8) for n in range(64)]),
    (32, 4, 128, None, 16, [(30000, 4), (500, 8)]),
    (16, 2, 512, None, 128, [(30000, 4), (9, 7)]),
    (16, 8, 256, 1024, 16, [(n, 8) for n in (0, 63, 64, 159, 1000, 1023, 5000, 20000)]),
]
LARGE: list[Shape] = [
    (64, 8, 64, None, 16, [(8191, 1), (131071, 1), (1, 1)]),
    (64, 8, 64, 128, 64, [(131071, 1), (4095, 1)]),
    (64, 8, 64, None, 16, [(0, 2048), (1000, 500), (3000, 1), (77, 1)]),
    (64, 8, 64, 128, 16, [(0, 2048), (1000, 500), (3000, 1), (77, 1)]),
    (16, 2, 512, None, 16, [(0, 500), (1000, 100)]),
    (16, 8, 256, 1024, 32, [(0, 1500), (5000, 1)]),
    (64, 8, 64, None, 32, [(n, 1) for n in (0, 1, 15, 16, 127, 128, 129, 1000, 4095, 20000, 65535)]),
    (64, 8, 64, None, 16, [(100 + 7 * n, 1) for n in range(150)] + [(50000, 1), (300, 2)]),
    # So many sequences that an H200 splits only the long one; also with a window, and with short ones alone.
    (64, 8, 64, None, 16, [(100 + 7 * n, 1) for n in range(150)] + [(50000, 1)]),
    (64, 8, 64, 128, 16, [(7 * n, 1) for n in range(150)]),
    (64, 8, 64, None, 16, [(n, 1) for n in range(150)]),
    (64, 8, 64, None, 16, [(100000, 1), (0, 700), (40000, 2), (5, 3)]),
    (16, 2, 512, None, 128, [(30000, 1), (9, 1)]),
    (16, 8, 256, 1024, 16, [(n, 1) for n in (0, 63, 64, 159, 1000, 1023, 5000, 20000)]),
]
"""Real heads and long contexts, for a GPU."""


def make_batch(shape_of: Shape, fp8: bool, device: str, *, verify: bool = False) -> Batch:
    """Pages are handed out in random order; slots that no query may see hold NaN. ``verify``: as drafts."""
    heads, kv_heads, dim, window, page_size, sequences = shape_of
    generator = torch.Generator().manual_seed(sum(c + n for c, n in sequences) + dim)
    lens = [cached + new for cached, new in sequences]
    counts = [-(-n // page_size) for n in lens]
    pages = torch.randperm(sum(counts) + 2, generator=generator).int().tolist()
    shape = (len(pages), kv_heads, page_size, dim)
    k, v = (torch.full(shape, math.nan) for _ in range(2))
    table = torch.full((len(sequences), max(counts)), pages.pop(), dtype=torch.int32)
    for seq, (cached, new) in enumerate(sequences):
        for index in range(counts[seq]):
            table[seq, index] = pages.pop()
        lowest = 0 if window is None else max(0, cached - window + 1)
        position = torch.arange(lowest, cached + new)
        page, slot = table[seq, position // page_size].long(), position % page_size
        for cache in (k, v):
            cache[page, :, slot] = torch.randn(len(position), kv_heads, dim, generator=generator)
    starts = torch.tensor([0, *(n for _, n in sequences)]).cumsum(0).int()
    q = torch.randn(int(starts[-1]), heads, dim, generator=generator).bfloat16() * 2
    spec = AttentionSpec(heads, kv_heads, dim, window, True, page_size, Activations.BF16, q.shape[0], max(lens))
    batch = AttentionBatch(
        starts.to(device), torch.tensor(lens).int().to(device), table.to(device), max(n for _, n in sequences), verify
    )
    if fp8:
        scales = [torch.rand(kv_heads, generator=generator) + 0.5 for _ in range(2)]
        codes = [(c / s[None, :, None, None]).to(torch.float8_e4m3fn) for c, s in zip((k, v), scales, strict=True)]
        kv = PagedKv(*(c.view(torch.uint8).to(device) for c in codes), *(s.to(device) for s in scales))
    else:
        kv = PagedKv(k.bfloat16().to(device), v.bfloat16().to(device))
    return spec, q.to(device), kv, batch


def sink_of(sequences: list[tuple[int, int]], fp8: bool = False) -> float:
    """Where keys are split it outweighs them all, so that to count it twice, or never, shows. With FP8 it does not, so
    that the closer bound holds the sum of the splits."""
    return 30.0 if max(map(sum, sequences)) > 500 and not fp8 else 0.5


def make_sinks(num_heads: int, sink: float | None, device: str) -> Tensor | None:
    if sink is None:
        return None
    noise = torch.randn(num_heads, generator=torch.Generator().manual_seed(0))
    return (sink + noise).bfloat16().to(device)


def attention_bound(expected: Tensor, *, alone: bool = False) -> Errors:
    """Two roundings to bf16, of weights and outputs, and room for the sums. ``worst`` is relative to the largest.

    The RMS error of two independent roundings is the root of two; an output that is truncated has twice that of one.
    Where a large sink leaves the weights of one row all that counts, its rounding is that of all: so ``alone`` is for
    small cases without such a sink."""
    return Errors(3 * step("bf16") * spread(expected), (1.6 if alone else 3) * rms_step("bf16"))


FAR = 2**31
"""Offsets from here on need 64 bits."""


def far_pages(kv: PagedKv, batch: AttentionBatch) -> tuple[PagedKv, AttentionBatch]:
    """The same in a cache of more than ``FAR`` numbers, whose last pages are used. A CPU has only those in memory."""
    shift = FAR // kv.k[0].numel()
    k, v = (torch.empty(shift + len(x), *x.shape[1:], dtype=x.dtype, device=x.device) for x in (kv.k, kv.v))
    k[shift:], v[shift:] = kv.k, kv.v
    return replace(kv, k=k, v=v), replace(batch, page_table=batch.page_table + shift)


@dataclass(frozen=True)
class AttentionKernelCase(OracleCase):
    shape: Shape
    fp8: bool
    sink: float | None
    verify: bool = False
    far: bool = False
    """In pages behind ``FAR`` numbers."""

    op: ClassVar[str] = "attention"

    def label(self) -> str:
        return "FP8 KV" if self.fp8 else ""

    @property
    def entry(self) -> AttentionOp:
        return registry.attention("triton_paged")

    @property
    def spec(self) -> AttentionSpec:
        """As the oracle is asked: sizes of layer and batch, and no tensor."""
        heads, kv_heads, dim, window, page_size, sequences = self.shape
        longest = max(cached + new for cached, new in sequences)
        newest = max(new for _, new in sequences)
        batch = BatchShape(len(sequences), newest, -(-longest // page_size), self.fp8, verify=self.verify)
        tokens = sum(new for _, new in sequences)
        sizes = (heads, kv_heads, dim, window, True, page_size, Activations.BF16, tokens, longest)
        return AttentionSpec(*sizes, batch=batch)

    def start(self, gpu: Gpu, device: str) -> Finish:
        spec, q, kv, batch = self.make(device)
        spec = replace(spec, batch=BatchShape.of(kv, batch))
        sinks = make_sinks(spec.num_heads, self.sink, device)
        just_written(q)
        y = self.entry.run(spec, gpu, q, kv, batch, sinks, path_of(self.entry, PathList.RUN, spec, gpu))

        return lambda: self.hold(y, attention(q, kv, batch, spec, sinks))

    def make(self, device: str) -> Batch:
        spec, q, kv, batch = make_batch(self.shape, self.fp8, device, verify=self.verify)
        return (spec, q, *far_pages(kv, batch)) if self.far else (spec, q, kv, batch)

    def hold(self, y: Tensor, want: Tensor) -> Iterator[Compared]:
        yield compare("y", y, want, attention_bound(want, alone=self.sink in (None, 0.5) and not self.large))


@dataclass(frozen=True)
class EqualKeysCase(AttentionKernelCase):
    """All keys weigh the same, values are whole numbers, and there are a power of two of them: every sum is exact, and
    nothing is rounded before the answer."""

    def make(self, device: str) -> Batch:
        spec, q, kv, batch = super().make(device)
        whole = replace(kv, v=(kv.v * 40).round().clamp(-127, 127))
        return spec, torch.zeros_like(q), whole, batch

    def hold(self, y: Tensor, want: Tensor) -> Iterator[Compared]:
        yield same("y", y, want.bfloat16())


def name_of(shape: Shape, fp8: bool, sink: float | None) -> str:
    heads, kv_heads, dim, window, page_size, sequences = shape
    parts = [f"{heads} heads over {kv_heads} of {dim}", f"pages of {page_size}"]
    parts += [] if window is None else [f"window {window}"]
    parts += [f"{cached} + {new}" for cached, new in sequences[:4]]
    parts += [f"{len(sequences) - 4} more"] if len(sequences) > 4 else []
    return ", ".join([*parts, "FP8" if fp8 else "bf16", *([] if sink is None else [f"sinks near {sink:g}"])])


def cases() -> Iterator[KernelCase]:
    for shape in (*SHAPES, *LARGE):
        for fp8 in (False, True):
            own = 0.0 if shape in LARGE else sink_of(shape[-1], fp8)
            for sink in (own, *((None, 29.0, -30.0) if shape in SHAPES[:4] and not fp8 else ())):
                # Sinks meet neither FP8 nor the size of heads in the code.
                yield AttentionKernelCase(name_of(shape, fp8, sink), shape, fp8, sink, large=shape in LARGE)
    for shape in (SHAPES[1], SHAPES[7], SHAPES[13]):
        for fp8 in (False, True):
            name = f"{name_of(shape, fp8, 0.0)}, in pages behind 2**31 numbers"
            yield AttentionKernelCase(name, shape, fp8, 0.0, far=True)
    shape = (8, 1, 64, None, 64, [(2047, 1), (511, 1), (255, 1)])
    yield EqualKeysCase(f"{name_of(shape, False, None)}, equal keys", shape, False, None)
    for shape in (*DRAFTED, *LARGE_DRAFTED):
        for fp8 in (False, True):
            large = shape in LARGE_DRAFTED
            sink = 0.0 if large else sink_of(shape[-1], fp8)
            name = f"{name_of(shape, fp8, sink)}, drafted"
            yield AttentionKernelCase(name, shape, fp8, sink, verify=True, large=large)
