"""Under which names and sizes the benchmarks measured what a model asks for: op, implementation, path, bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from microscale.engine.step_times import FUSED_SEQUENCES
from microscale.hardware import Gpu
from microscale.kernels.attention.op import AttentionOp
from microscale.kernels.attention.spec import AttentionSpec, BatchShape
from microscale.kernels.attention.widen import COPY
from microscale.kernels.dense.cost import activation_bytes, weight_bytes
from microscale.kernels.dense.spec import DenseOp, DenseSpec
from microscale.kernels.op import Cost, Implementation
from microscale.kernels.small import cost as small_cost
from microscale.kernels.small.spec import SmallSpec
from microscale.planning.paths import LM_HEAD, PathList, ask
from microscale_lab.predict.kernel_fit import KernelWork

PLAIN_HEADS = 64
"""Heads of any other size are groups of their own."""
TORCH = "torch"
"""The path of an implementation that has one way and launches nothing of ours."""
PROMPT_TOKENS = 256


@dataclass(frozen=True)
class Call:
    """One call as a benchmark would time it."""

    op: str
    implementation: str
    path: str
    work: KernelWork
    launches: int = 1


def calls(entry: Implementation[Any], layer: str, spec: Any, cost: Cost, gpu: Gpu, kv_size: int) -> Iterator[Call]:
    """The calls that one use of a layer makes."""
    if isinstance(spec, SmallSpec):
        yield from _small(entry.name, spec)
        return
    work = KernelWork(cost.bytes, cost.flops, cost.unit.value)
    if isinstance(spec, DenseSpec):
        # As the rows count: weights once, whatever a path copies or reads again.
        work = replace(work, bytes=weight_bytes(spec) + activation_bytes(spec))
    yield Call(entry.op, cost.runs_as or entry.name, path_name(entry, layer, spec, gpu, kv_size), work, cost.launches)


def path_name(entry: Implementation[Any], layer: str, spec: Any, gpu: Gpu, kv_size: int = 2) -> str:
    """The path that runs the spec, with everything else that distinguishes rows."""
    logits = isinstance(entry, DenseOp) and layer.partition(".")[0] == LM_HEAD
    if isinstance(entry, AttentionOp) and isinstance(spec, AttentionSpec):
        spec = replace(spec, batch=spec.batch or _batch(spec, kv_size))
    found = ask(entry, PathList.LOGITS if logits else PathList.RUN, spec, gpu).path
    name = TORCH if found is None else found.timed_as or found.name
    if not isinstance(spec, AttentionSpec):
        return name
    # Last, so that without rows of its own the path takes those of the same heads.
    plain = name.removesuffix(f", {COPY}")
    copy, name = COPY if plain != name else "", plain
    parts = (
        f"heads of {spec.head_dim}" if spec.head_dim != PLAIN_HEADS else "",
        "FP8 KV" if spec.shape.kv_fp8 else "",
        copy,
        "drafts" if spec.shape.verify else "",
    )
    return ", ".join((name, *filter(None, parts)))


def _batch(spec: AttentionSpec, kv_size: int) -> BatchShape:
    pages = -(-spec.context // spec.page_size)
    prompt = spec.tokens > PROMPT_TOKENS
    return BatchShape(1 if prompt else spec.tokens, spec.tokens if prompt else 1, pages, kv_size == 1)


def _small(name: str, spec: SmallSpec) -> Iterator[Call]:
    """A decoder layer norms, rotates and writes keys and values, and routes behind a second norm."""
    parts = {"add_rms_norm": small_cost.add_rms_norm(spec), "add_norm_route": small_cost.add_norm_route(spec)}
    if spec.tokens > FUSED_SEQUENCES:
        parts["rope_and_write_kv"] = small_cost.rope_and_write_kv(spec)
    for path, num_bytes in parts.items():
        yield Call("small", name, path, KernelWork(num_bytes, 0))
