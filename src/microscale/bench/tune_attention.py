"""What ``microscale tune`` runs of attention: decode, decode from the projection, and prefill, of the layers that the
benchmark knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from microscale.backends.calls import run_attention, run_fused
from microscale.bench.attention import LAYERS, RMS_TOLERANCE, Case, Layer, make_batch, make_kv, rms_error
from microscale.bench.tune_job import Job, Problem
from microscale.hardware import Feature, Gpu
from microscale.hardware.tiles import attention as tiles
from microscale.hardware.tiles.attention import Kv, Work
from microscale.kernels.attention.fused_decode import HeadTransform
from microscale.kernels.attention.paged import PagedAttention
from microscale.kernels.attention.reference import attention
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, PagedKv
from microscale.kernels.small.reference import rope_and_write_kv
from microscale.kernels.small.spec import HeadNorms, RopeTable

DECODE_SEQUENCES, DECODE_CONTEXT = 8, 8192
FUSED_CONTEXT = 192
PREFILL = 4096
# Norm, rotation and the keys round to bf16 before attention does: see tests/kernels/cases_attention.py.
FUSED_TOLERANCE = 1.5 * RMS_TOLERANCE
LAYERS_IN_A_GRAPH = 4


def jobs(gpu: Gpu, quick: bool) -> Iterator[Job]:
    """Each kind of work, head size and KV format once, by the first layer that has it."""
    seen = set()
    for layer in LAYERS[: 1 if quick else None]:
        heads = Case(layer, 1, 1).spec
        for work in (Work.DECODE, Work.FUSED_DECODE, Work.PREFILL):
            if work is Work.FUSED_DECODE and not gpu.has(Feature.PDL):
                continue
            for kv in (Kv.BF16,) if quick or work is Work.FUSED_DECODE else Kv:
                kind = Work.PREFILL_WINDOW if work is Work.PREFILL and heads.window is not None else work
                key = tiles.Case(kind, heads.head_dim, kv)
                if key not in seen:
                    seen.add(key)
                    yield job_of(key, layer, gpu)


def case_of(key: tiles.Case, layer: Layer) -> Case:
    fp8 = key.kv is Kv.FP8
    if key.work is Work.FUSED_DECODE:
        return Case(layer, 1, FUSED_CONTEXT, fp8=fp8)
    if key.work is Work.DECODE:
        return Case(layer, DECODE_SEQUENCES, DECODE_CONTEXT, fp8=fp8)
    return Case(layer, 1, PREFILL, new=PREFILL, fp8=fp8)


def job_of(key: tiles.Case, layer: Layer, gpu: Gpu) -> Job:
    case = case_of(key, layer)
    prepare = _fused(case, gpu) if key.work is Work.FUSED_DECODE else _plain(case, gpu)
    fused = " from the projection" if key.work is Work.FUSED_DECODE else ""
    return Job(tiles.SECTION, key, f"{case.name}{fused}", tiles.candidates(key, gpu), prepare)


def _plain(case: Case, gpu: Gpu) -> Callable[[str], Problem]:
    def prepare(device: str) -> Problem:
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

        return Problem(lambda: [attend(kv) for kv in caches], error, RMS_TOLERANCE, len(caches))

    return prepare


def transform_of(heads: AttentionSpec, generator: torch.Generator) -> HeadTransform:
    """Rotation, and the norms without which wide heads have no kernel."""
    device = generator.device
    half = heads.head_dim // 2
    rope = RopeTable(1.0 / 10000 ** (torch.arange(half, device=device) / half), 1.0)
    if heads.head_dim <= 128:
        return HeadTransform(rope, None, shared=False)
    q, k = (torch.rand(heads.head_dim, device=device, generator=generator).add(0.5).bfloat16() for _ in range(2))
    return HeadTransform(rope, HeadNorms(q, k, 1e-6), shared=False)


def fused_answer(
    qkv: Tensor, transform: HeadTransform, kv: PagedKv, batch: AttentionBatch, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """By the two references, on a copy of the cache."""
    copy = replace(kv, k=kv.k.clone(), v=kv.v.clone())
    positions = batch.context_lens.long() - 1
    pages = batch.page_table.long().gather(1, positions[:, None] // spec.page_size)[:, 0]
    slots = pages * spec.page_size + positions % spec.page_size
    q = rope_and_write_kv(qkv, spec.num_heads, positions, transform.rope, copy, slots, transform.norms)
    return attention(q, copy, batch, spec, sinks)


def _fused(case: Case, gpu: Gpu) -> Callable[[str], Problem]:
    def prepare(device: str) -> Problem:
        generator = torch.Generator(device).manual_seed(0)
        spec = case.spec
        batch = make_batch(case, generator, device)
        caches = [make_kv(case, generator, device) for _ in range(LAYERS_IN_A_GRAPH)]
        all_heads = spec.num_heads + 2 * spec.num_kv_heads
        qkv = torch.randn(case.sequences, all_heads, spec.head_dim, device=device, generator=generator).bfloat16()
        transform = transform_of(spec, generator)
        sinks = torch.randn(spec.num_heads, device=device, generator=generator).bfloat16() if spec.sinks else None
        expected = fused_answer(qkv, transform, caches[0], batch, spec, sinks)

        def attend(kv: PagedKv) -> Tensor:
            return run_fused(PagedAttention(), spec, gpu, qkv, transform, kv, batch, sinks)

        def error() -> float:
            return float((attend(caches[0]).float() - expected).norm() / expected.norm())

        return Problem(lambda: [attend(kv) for kv in caches], error, FUSED_TOLERANCE, len(caches))

    return prepare
