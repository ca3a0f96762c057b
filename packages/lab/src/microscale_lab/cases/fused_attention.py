"""Cases of attention straight from the projection: norms, rotation and the KV write in the launch that decodes, one
new token of each sequence or its next one and drafts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, ClassVar

import torch

from microscale.hardware import Gpu
from microscale.kernels.attention.fused_decode import HeadTransform, kinds
from microscale.kernels.attention.op import AttentionOp
from microscale.kernels.attention.reference import attention
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, BatchShape, HeadsKind, PagedKv
from microscale.kernels.op import Activations
from microscale.kernels.small.reference import rope_and_write_kv
from microscale.kernels.small.spec import HeadNorms, RopeTable
from microscale.planning import registry
from microscale.planning.paths import PathList, path_of
from microscale_lab.cases.attention import Shape, make_batch, name_of, sink_of
from microscale_lab.cases.case import Compared, Finish, KernelCase, OracleCase, compare, just_written, same
from microscale_lab.cases.errors import Errors, rms_step, spread, step

if TYPE_CHECKING:
    from torch import Tensor

FusedShape = tuple[int, int, int, int | None, int, list[int]]
"""Heads, KV heads, head_dim, window, page size, and each sequence's context, the new token included."""
PLAIN_HEADS = (False, False, False)
KINDS: dict[str, HeadsKind] = {
    "plain": PLAIN_HEADS,
    "normed": (True, True, False),
    "shared": (True, True, True),
    "values left alone": (True, False, False),
}
SHAPES: list[FusedShape] = [
    # heads, kv_heads, dim, window, page_size, context lengths, the new token included
    (8, 1, 64, None, 16, [1]),
    (16, 2, 64, 128, 16, [1, 2, 31, 127, 128, 129, 130, 300]),
    (28, 2, 64, None, 32, [2049, 1, 257]),  # 14 heads in a group; splits that the last program adds up
    (8, 1, 64, None, 64, [2600, 3, 513]),  # and splits that have a launch for it
    (4, 2, 128, 1, 16, [1, 40]),
    (4, 2, 256, 40, 16, [1, 32, 33, 34, 41, 65, 100]),
    (16, 2, 512, None, 16, [1, 2, 33, 65, 129]),
    (8, 1, 64, None, 64, [8800, 3]),  # more splits than one step of their sum has
    (8, 1, 64, 20, 16, [20, 21, 22, 36, 37, 52, 53, 84]),  # a window that begins around the borders of blocks
]
"""Small ones: for interpreters too."""
LENGTHS = [1, 2, 31, 32, 33, 64, 65, 127, 128, 129, 1000, 1024, 1025, 2047, 2048, 2049, 4100]
LARGE: list[FusedShape] = [
    (64, 8, 64, None, 16, [n]) for n in LENGTHS
] + [
    (64, 8, 64, None, 16, LENGTHS),
    (64, 8, 64, 128, 16, LENGTHS),
    (64, 8, 64, None, 16, [131071, 1, 9000]),
    (32, 8, 128, None, 16, LENGTHS),
    (32, 4, 128, None, 16, LENGTHS),
    (16, 8, 256, 1024, 16, LENGTHS),
    (16, 8, 256, 1024, 16, [1000]),
    (16, 8, 256, 1024, 16, [20000]),
    (16, 8, 256, 1024, 16, [160 + 3 * n for n in range(100)]),
    (16, 2, 512, None, 16, LENGTHS),
    (16, 2, 512, None, 16, [160]),
    (16, 2, 512, None, 16, [30000, 1]),
]  # fmt: skip
"""Real heads and long contexts, for a GPU."""
VERIFY: list[Shape] = [
    # heads, kv_heads, dim, window, page_size, [(cached, new), …]
    (8, 1, 64, None, 16, [(0, 2)]),
    (8, 1, 64, None, 16, [(300, 4), (14, 3)]),  # 32 rows; new tokens on two pages
    (8, 1, 64, None, 16, [(64, 2), (90, 0)]),
    (16, 2, 64, 128, 16, [(126, 4), (129, 1)]),  # one block at all borders
    (16, 2, 64, 128, 16, [(127, 3), (128, 2)]),
    (16, 2, 64, 128, 16, [(14, 4), (500, 4)]),
    (16, 2, 64, 3, 16, [(40, 4), (6, 3)]),  # a window shorter than the drafts
    (16, 2, 64, 3, 16, [(0, 4)]),
    (8, 1, 64, None, 64, [(2600, 4), (90, 3)]),  # splits that have a launch for their sum
    (8, 1, 64, None, 32, [(1900, 2), (511, 2)]),  # and splits that the last program adds up
    (8, 1, 64, None, 32, [(1900, 3), (511, 2)]),  # the same of two blocks of rows, of which one is not whole
    (16, 1, 64, 20, 16, [(10, 2), (25, 1)]),  # 16 heads in a group
    (4, 2, 64, 40, 16, [(70, 15), (30, 9)]),  # two
    (2, 2, 64, None, 16, [(20, 20), (150, 7)]),  # one; more tokens than the least tile of new keys has
]
"""Sequences that decode with drafts, two at most: more than that take another path. Small ones."""
LARGE_VERIFY: list[Shape] = [
    (64, 8, 64, window, 16, [(context, new)])
    for window in (None, 128)
    for new in (2, 4)
    for context in (0, 1, 15, 127, 128, 129, 1000, 2047, 2048, 8000)
] + [
    (64, 8, 64, None, 16, [(8000, 4), (131000, 3), (1, 1)]),
    (64, 8, 64, 128, 64, [(131000, 3), (4095, 1)]),
    (64, 8, 64, None, 16, [(100 + 7 * n, 1 + n % 4) for n in range(64)]),
]  # fmt: skip


@dataclass(frozen=True)
class FusedProblem:
    """One step of decoding from the projection's heads on. New slots hold NaN, like everything that was not written."""

    spec: AttentionSpec
    qkv: Tensor
    transform: HeadTransform
    kv: PagedKv
    batch: AttentionBatch
    positions: Tensor
    slots: Tensor
    sinks: Tensor | None

    def copy_of_kv(self) -> PagedKv:
        return replace(self.kv, k=self.kv.k.clone(), v=self.kv.v.clone())


def make_fused(
    shape: FusedShape, fp8: bool, kind: HeadsKind, device: str, sink: float | None = None, empty: int | None = None
) -> FusedProblem:
    """``empty`` is a sequence without a new token."""
    sequences = [(n - 1, int(seq != empty)) for seq, n in enumerate(shape[-1])]
    return make_heads((*shape[:5], sequences), fp8, kind, device, sink)


def make_heads(
    shape: Shape, fp8: bool, kind: HeadsKind, device: str, sink: float | None = None, *, verify: bool = False
) -> FusedProblem:
    """New tokens of sequences as the projection gives them. ``verify``: as drafts."""
    norm, norm_v, shared = kind
    heads, kv_heads, dim, _, page_size, sequences = shape
    spec, _, kv, batch = make_batch(shape, fp8, device, verify=verify)
    generator = torch.Generator().manual_seed(len(sequences))
    places = [(seq, cached + n) for seq, (cached, new) in enumerate(sequences) for n in range(new)]
    of, positions = torch.tensor(places, device=device).view(-1, 2).T.contiguous()
    slots = batch.page_table[of, positions // page_size].long() * page_size + positions % page_size
    for cache in (kv.k, kv.v):
        cache[slots // page_size, :, slots % page_size] = 0x7F if fp8 else math.nan
    qkv = torch.randn(len(places), heads + (1 if shared else 2) * kv_heads, dim, generator=generator) * 2
    frequencies = 1.0 / 1e4 ** (torch.arange(dim // 2) / (dim // 2))
    frequencies[dim // 4 :] *= not shared  # Gemma 4's full layers: a part of each head turns
    norms = None
    if norm:
        q_weight, k_weight = (1 + 0.2 * torch.randn(2, dim, generator=generator)).bfloat16().to(device)
        norms = HeadNorms(q_weight, k_weight, 1e-6, values=norm_v)
        spec = replace(spec, scale=0.25)
    transform = HeadTransform(RopeTable(frequencies.to(device), 1.0 if norm else 1.3466), norms, shared)
    noise = torch.randn(heads, generator=generator)
    sinks = None if sink is None else (sink + noise).bfloat16().to(device)
    return FusedProblem(spec, qkv.bfloat16().to(device), transform, kv, batch, positions, slots, sinks)


def fused_bound(expected: Tensor, *, alone: bool = False) -> Errors:
    """As of attention, and room for queries and keys of which one in some hundreds is rounded otherwise: the sum of a
    head's squares is taken in another order."""
    return Errors(4 * step("bf16") * spread(expected), (1.8 if alone else 3) * rms_step("bf16"))


@dataclass(frozen=True)
class FusedCase(OracleCase):
    shape: Shape
    fp8: bool
    kind: HeadsKind
    sink: float | None
    verify: bool = False

    op: ClassVar[str] = "attention"

    form: ClassVar[PathList] = PathList.FUSED

    def label(self) -> str:
        return "FP8 KV" if self.fp8 else ""

    @property
    def entry(self) -> AttentionOp:
        return registry.attention("triton_paged")

    @property
    def spec(self) -> AttentionSpec:
        """As the oracle is asked: sizes of layer and batch, and no tensor."""
        heads, kv_heads, dim, window, page_size, sequences = self.shape
        longest, context = max(new for _, new in sequences), max(map(sum, sequences))
        batch = BatchShape(len(sequences), longest, -(-context // page_size), self.fp8, self.kind, self.verify)
        tokens = sum(new for _, new in sequences)
        sizes = (heads, kv_heads, dim, window, True, page_size, Activations.BF16, tokens, context)
        return AttentionSpec(*sizes, batch=batch)

    def start(self, gpu: Gpu, device: str) -> Finish:
        given = make_heads(self.shape, self.fp8, self.kind, device, self.sink, verify=self.verify)
        ours = given.copy_of_kv()
        spec = replace(given.spec, batch=BatchShape.of(ours, given.batch, given.transform.kind))
        path = path_of(self.entry, PathList.FUSED, spec, gpu)
        just_written(given.qkv)
        y = self.entry.run_fused(spec, gpu, given.qkv, given.transform, ours, given.batch, given.sinks, path)
        return lambda: self._hold(given, y, ours)

    def _hold(self, given: FusedProblem, y: Tensor, ours: PagedKv) -> Iterator[Compared]:
        exact = given.copy_of_kv()
        heads = (given.spec.num_heads, given.positions, given.transform.rope)
        q = rope_and_write_kv(given.qkv, *heads, exact, given.slots, given.transform.norms)
        want = attention(q, exact, given.batch, given.spec, given.sinks)
        yield compare("y", y, want, fused_bound(want, alone=self.sink in (None, 0.5) and not self.large))
        yield from hold_cache(ours, exact, given.slots)


def hold_cache(ours: PagedKv, exact: PagedKv, slots: Tensor) -> Iterator[Compared]:
    """What was written to the slots, which may differ by a rounding, and all the rest, which may not."""
    page, offset = slots // ours.page_size, slots % ours.page_size
    for name, got, want in (("keys", ours.k, exact.k), ("values", ours.v, exact.v)):
        fmt = "e4m3" if got.dtype == torch.uint8 else "bf16"
        new, exact_new = (_numbers(cache[page, :, offset]) for cache in (got, want))
        yield compare(name, new, exact_new, Errors(2 * step(fmt) * spread(exact_new), 2 * rms_step(fmt)))
        rest, rest_before = got.clone(), want.clone()
        for cache in (rest, rest_before):
            cache[page, :, offset] = 0
        yield same(f"{name} of other slots", rest, rest_before)


def _numbers(cache: Tensor) -> Tensor:
    return cache.view(torch.float8_e4m3fn).float() if cache.dtype == torch.uint8 else cache.float()


def one_of_three(place: int, fp8: bool, kind: HeadsKind, head_dim: int) -> bool:
    """Each is another kernel: one of three is enough for a CPU, and meets every kind and format."""
    return (place + 2 * fp8 + kinds(head_dim).index(kind)) % 3 == 0


def cases() -> Iterator[KernelCase]:
    decode: list[Shape] = [(*shape[:5], [(n - 1, 1) for n in shape[-1]]) for shape in (*SHAPES, *LARGE)]
    for (place, shape), fp8, (title, kind) in product(enumerate(decode), (False, True), KINDS.items()):
        if kind in kinds(shape[2]):
            sink = None if kind[0] else sink_of(shape[-1], fp8) if place < len(SHAPES) else 0.5
            large = place >= len(SHAPES) or not one_of_three(place, fp8, kind, shape[2])
            yield FusedCase(f"{name_of(shape, fp8, sink)}, {title} heads", shape, fp8, kind, sink, large=large)
    for place, shape in enumerate((*VERIFY, *LARGE_VERIFY)):
        large = place >= len(VERIFY)
        sink = 0.5 if large else sink_of(shape[-1])
        name = f"{name_of(shape, False, sink)}, drafted"
        yield FusedCase(name, shape, False, PLAIN_HEADS, sink, verify=True, large=large)
    sequences = [(4, 1), (299, 0), (69, 1)]
    yield FusedCase("a sequence without a token", (8, 1, 64, None, 16, sequences), False, PLAIN_HEADS, 0.0)
