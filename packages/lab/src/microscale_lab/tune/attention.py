"""What ``microscale tune`` runs of attention: decode, from queries and from the projection, both with drafts and
without, and prefill with and without a window, of every head size and KV format. Heads are those of the presets; a kind
of layer that none of them has, such as heads of 128 with a window, is one of theirs with the window changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from microscale.hardware import Gpu
from microscale.hardware.tiles import attention as tiles
from microscale.hardware.tiles import thresholds
from microscale.hardware.tiles.attention import AttentionWork, Kv
from microscale.hardware.tiles.thresholds import NEVER, Key, ThresholdName, Value
from microscale.kernels.attention.fused_decode import HeadTransform
from microscale.kernels.attention.paged import PagedAttention
from microscale.kernels.attention.reference import attention
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, PagedKv
from microscale.kernels.numbers import cdiv
from microscale.kernels.small.fused import TritonSmall
from microscale.kernels.small.reference import rope_and_write_kv
from microscale.kernels.small.spec import HeadNorms, RopeTable
from microscale.models.config import LayerKind
from microscale_lab.calls import run_attention, run_fused
from microscale_lab.kernel_bench.attention import (
    RMS_TOLERANCE,
    SINKS_FULL,
    SINKS_SLIDING,
    WIDE_FULL,
    WIDE_SLIDING,
    AttentionInput,
    Layer,
    make_batch,
    make_kv,
    rms_error,
)
from microscale_lab.tune import candidates
from microscale_lab.tune.job import TileSearch, TuningProblem

if TYPE_CHECKING:
    from torch import Tensor

DECODE_SEQUENCES, DECODE_CONTEXT = 8, 8192
MANY_CONTEXT = 544
FUSED_CONTEXT = 192
PREFILL = 4096
WINDOW = 1024
"""Where no preset has a window with such heads."""
# Norm, rotation and the keys round to bf16 before attention does: see tests/kernels/cases_attention.py.
FUSED_TOLERANCE = 1.5 * RMS_TOLERANCE
LAYERS_IN_A_GRAPH = 4
LAYER_OF: dict[int, Layer] = {64: SINKS_FULL, 128: ("qwen3-30b-a3b", LayerKind.FULL), 256: WIDE_SLIDING, 512: WIDE_FULL}
"""Head size → the layer that has it; of two the one that sees everything."""
QUICK = (
    tiles.AttentionCase(AttentionWork.DECODE, 64, Kv.BF16),
    tiles.AttentionCase(AttentionWork.FUSED_DECODE, 64, Kv.BF16),
    tiles.AttentionCase(AttentionWork.PREFILL, 64, Kv.BF16),
    tiles.AttentionCase(AttentionWork.DECODE, 128, Kv.BF16),
    tiles.AttentionCase(AttentionWork.FUSED_DECODE, 64, Kv.FP8),
)


@dataclass(frozen=True)
class Windowed(AttentionInput):
    """A layer with another window than its model has, or none."""

    window: int | None = None

    @property
    def name(self) -> str:
        return f"{super().name}, {'no window' if self.window is None else f'window {self.window}'}"

    @property
    def spec(self) -> AttentionSpec:
        return replace(super().spec, window=self.window)


def jobs(gpu: Gpu, quick: bool) -> Iterator[TileSearch]:
    """Each kind of work, head size and KV format once."""
    keys = QUICK if quick else tuple(tiles.cases())
    for key in keys:
        if tiles.no_kernel(key, gpu) is None:
            yield job_of(key, gpu)


def case_of(key: tiles.AttentionCase, gpu: Gpu) -> AttentionInput:
    layer, fp8 = LAYER_OF[key.head_dim], key.kv is Kv.FP8
    if key.work.decodes:
        spec = AttentionInput(layer, 1, 1).spec
        if key.work is AttentionWork.DECODE_MANY:
            return AttentionInput(
                layer, cdiv(tiles.MANY_PROGRAMS * gpu.num_sms, spec.num_kv_heads), MANY_CONTEXT, fp8=fp8
            )
        one = key.work in (AttentionWork.DECODE, AttentionWork.FUSED_DECODE)
        rows = tiles.VERIFY_ROWS if key.work is AttentionWork.FUSED_VERIFY else key.work.rows
        new = 1 if one else rows * spec.num_kv_heads // spec.num_heads
        if key.work.fused:
            return AttentionInput(layer, 1, FUSED_CONTEXT, new, fp8, verify=new > 1)
        return AttentionInput(layer, DECODE_SEQUENCES, DECODE_CONTEXT, new, fp8, verify=new > 1)
    if key.work is AttentionWork.PREFILL_WINDOW and key.head_dim == 64:
        layer = SINKS_SLIDING
    case = AttentionInput(layer, 1, PREFILL, new=PREFILL, fp8=fp8)
    if (case.spec.window is not None) == (key.work is AttentionWork.PREFILL_WINDOW):
        return case
    window = None if key.work is AttentionWork.PREFILL else WINDOW
    return Windowed(layer, 1, PREFILL, new=PREFILL, fp8=fp8, window=window)


def job_of(key: tiles.AttentionCase, gpu: Gpu) -> TileSearch:
    case = case_of(key, gpu)
    prepare = fused(case, gpu) if key.work.fused else as_stored(case, gpu)
    from_heads = " from the projection" if key.work.fused else ""
    return TileSearch(tiles.SECTION, key, f"{case.name}{from_heads}", candidates.of_attention(key, gpu), prepare)


def plain(case: AttentionInput, gpu: Gpu) -> Callable[[str], TuningProblem]:
    """From queries."""

    def prepare(device: str) -> TuningProblem:
        generator = torch.Generator(device).manual_seed(0)
        spec = case.spec
        caches = [make_kv(case, generator, device) for _ in range(LAYERS_IN_A_GRAPH)]
        batch = make_batch(case, generator, device)
        q = torch.randn(spec.tokens, spec.num_heads, spec.head_dim, device=device, generator=generator)
        q = (q * spec.head_dim**-0.5 if spec.scale is not None else q).bfloat16()
        sinks = torch.randn(spec.num_heads, device=device, generator=generator).bfloat16()

        def attend(kv: PagedKv) -> Tensor:
            return run_attention(PagedAttention(), spec, gpu, q, kv, batch, sinks if spec.sinks else None)

        def error() -> float:
            return rms_error(attend(caches[0]), q, caches[0], batch, spec, sinks)

        return TuningProblem(lambda: [attend(kv) for kv in caches], error, RMS_TOLERANCE, len(caches))

    return prepare


def as_stored(case: AttentionInput, gpu: Gpu) -> Callable[[str], TuningProblem]:
    """From queries, with no bf16 copy of FP8 keys."""
    return lambda device: widened_from(NEVER, plain(case, gpu)(device), gpu)


def widened_from(rows: int, problem: TuningProblem, gpu: Gpu) -> TuningProblem:
    """With a bf16 copy of FP8 keys from ``rows`` query rows on."""
    return problem.under(thresholds.SECTION, gpu.family, Key(ThresholdName.WIDEN_ROWS), Value(rows))


def transform_of(heads: AttentionSpec, generator: torch.Generator) -> HeadTransform:
    """Rotation, and norms as the models with such heads have them: queries and keys from 128 on, values above."""
    device = generator.device
    half = heads.head_dim // 2
    rope = RopeTable(1.0 / 10000 ** (torch.arange(half, device=device) / half), 1.0)
    if heads.head_dim < 128:
        return HeadTransform(rope, None, shared=False)
    q, k = (torch.rand(heads.head_dim, device=device, generator=generator).add(0.5).bfloat16() for _ in range(2))
    return HeadTransform(rope, HeadNorms(q, k, 1e-6, values=heads.head_dim > 128), shared=False)


@dataclass(frozen=True)
class FromHeads:
    """Decode from the projection, with drafts or without, and layers with caches of their own."""

    spec: AttentionSpec
    batch: AttentionBatch
    caches: list[PagedKv]
    qkv: Tensor
    transform: HeadTransform
    sinks: Tensor | None
    positions: Tensor
    slots: Tensor

    @classmethod
    def of(cls, case: AttentionInput, device: str) -> FromHeads:
        generator = torch.Generator(device).manual_seed(0)
        spec = case.spec
        batch = make_batch(case, generator, device)
        caches = [make_kv(case, generator, device) for _ in range(LAYERS_IN_A_GRAPH)]
        all_heads = spec.num_heads + 2 * spec.num_kv_heads
        qkv = torch.randn(spec.tokens, all_heads, spec.head_dim, device=device, generator=generator).bfloat16()
        transform = transform_of(spec, generator)
        sinks = torch.randn(spec.num_heads, device=device, generator=generator).bfloat16() if spec.sinks else None
        positions = batch.context_lens.long()[:, None] - case.new + torch.arange(case.new, device=device)
        pages = batch.page_table.long().gather(1, positions // spec.page_size)
        slots = pages * spec.page_size + positions % spec.page_size
        return cls(spec, batch, caches, qkv, transform, sinks, positions.flatten(), slots.flatten())

    def answer(self) -> Tensor:
        """By the two references, on a copy of the first cache."""
        kv, heads = self.caches[0], (self.spec.num_heads, self.positions, self.transform.rope)
        copy = replace(kv, k=kv.k.clone(), v=kv.v.clone())
        q = rope_and_write_kv(self.qkv, *heads, copy, self.slots, self.transform.norms)
        return attention(q, copy, self.batch, self.spec, self.sinks)

    def in_one_launch(self, gpu: Gpu, kv: PagedKv) -> Tensor:
        transform, batch = self.transform, self.batch
        return run_fused(PagedAttention(), self.spec, gpu, self.qkv, transform, kv, batch, self.sinks)

    def apart(self, gpu: Gpu, kv: PagedKv) -> Tensor:
        heads = (self.spec.num_heads, self.positions, self.transform.rope)
        q = TritonSmall(gpu).rope_and_write_kv(self.qkv, *heads, kv, self.slots, self.transform.norms)
        return run_attention(PagedAttention(), self.spec, gpu, q, kv, self.batch, self.sinks)

    def problem(self, attend: Callable[[PagedKv], Tensor]) -> TuningProblem:
        expected = self.answer()

        def error() -> float:
            return float((attend(self.caches[0]).float() - expected).norm() / expected.norm())

        return TuningProblem(lambda: [attend(kv) for kv in self.caches], error, FUSED_TOLERANCE, len(self.caches))


def fused(case: AttentionInput, gpu: Gpu) -> Callable[[str], TuningProblem]:
    """From the projection."""

    def prepare(device: str) -> TuningProblem:
        heads = FromHeads.of(case, device)
        return heads.problem(lambda kv: heads.in_one_launch(gpu, kv))

    return prepare
