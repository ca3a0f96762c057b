"""One call of one implementation, by the path that the oracle picks: for benchmarks and tests.

Models call bound layers. Sizes come from the tensors: ``spec.tokens`` does not matter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from microscale.hardware import Gpu
from microscale.kernels.attention.fused_decode import HeadTransform
from microscale.kernels.attention.op import AttentionOp
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, BatchShape, PagedKv
from microscale.kernels.dense.spec import DenseOp, DenseSpec, Logits, Summed
from microscale.kernels.moe.spec import MoeOp, MoeSpec, Routing
from microscale.kernels.op import PackedT
from microscale.kernels.sampling.spec import Sampled, SamplingBatch, SamplingFeatures, SamplingOp, SamplingSpec
from microscale.kernels.small.spec import SmallOps, SmallSpec
from microscale.planning.bound import Small, SmallKind
from microscale.planning.path_cache import LayerChoice
from microscale.planning.paths import path_for

if TYPE_CHECKING:
    from torch import Tensor


def run_moe(entry: MoeOp[PackedT], packed: PackedT, spec: MoeSpec, gpu: Gpu, x: Tensor, routing: Routing) -> Tensor:
    spec = replace(spec, tokens=x.shape[0])
    return entry.run(packed, spec, gpu, x, routing, path_for(entry.paths, spec, gpu))


def run_dense(
    entry: DenseOp[PackedT], packed: PackedT, spec: DenseSpec, gpu: Gpu, x: Tensor, residual: Tensor | None = None
) -> Tensor:
    spec = replace(spec, tokens=x.shape[0])
    return entry.run(packed, spec, gpu, x, residual, path_for(entry.paths, spec, gpu))


def run_logits(entry: DenseOp[PackedT], packed: PackedT, spec: DenseSpec, gpu: Gpu, x: Tensor) -> Logits:
    spec = replace(spec, tokens=x.shape[0])
    return entry.run_logits(packed, spec, gpu, x, path_for(entry.logits_paths, spec, gpu))


def run_from_sum(
    entry: DenseOp[PackedT], packed: PackedT, spec: DenseSpec, gpu: Gpu, summed: Summed
) -> tuple[Tensor, Tensor]:
    """Refused with the reasons where no path is meant for so many tokens."""
    spec = replace(spec, tokens=summed.x.shape[0])
    return entry.run_from_sum(packed, spec, gpu, summed, path_for(entry.sum_paths, spec, gpu))


def run_attention(
    entry: AttentionOp, spec: AttentionSpec, gpu: Gpu, q: Tensor, kv: PagedKv, batch: AttentionBatch,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    spec = replace(spec, tokens=q.shape[0], batch=BatchShape.of(kv, batch))
    return entry.run(spec, gpu, q, kv, batch, sinks, path_for(entry.paths, spec, gpu))


def run_fused(
    entry: AttentionOp, spec: AttentionSpec, gpu: Gpu, qkv: Tensor, transform: HeadTransform, kv: PagedKv,
    batch: AttentionBatch, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Refused with the reasons where no path is meant for the batch."""
    spec = replace(spec, tokens=qkv.shape[0], batch=BatchShape.of(kv, batch, transform.kind))
    return entry.run_fused(spec, gpu, qkv, transform, kv, batch, sinks, path_for(entry.fused_paths, spec, gpu))


def bind_small(entry: SmallOps, spec: SmallSpec, gpu: Gpu) -> Small:
    """The small ops of an implementation for layers of these sizes."""
    return Small(SmallKind(LayerChoice((spec,), (entry,), gpu)))


def run_sampling(
    entry: SamplingOp, gpu: Gpu, logits: Tensor, batch: SamplingBatch, blocks: Logits | None = None
) -> Sampled:
    spec = SamplingSpec(logits.shape[1], logits.shape[0], batch.features(blocks))
    return entry.run(spec, gpu, logits, batch, blocks, path_for(entry.paths, spec, gpu))


def run_score(entry: SamplingOp, gpu: Gpu, logits: Tensor, tokens: Tensor, top_logprobs: int = 0) -> Sampled:
    spec = SamplingSpec(logits.shape[1], logits.shape[0], SamplingFeatures(tops=top_logprobs > 0))
    return entry.score(spec, gpu, logits, tokens, top_logprobs, path_for(entry.score_paths, spec, gpu))
