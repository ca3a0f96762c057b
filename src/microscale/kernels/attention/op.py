"""What every implementation of ``attention`` has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from microscale.hardware import Gpu
from microscale.kernels.attention.fused_decode import HeadTransform
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, PagedKv
from microscale.kernels.op import Implementation, Path

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AttentionPath(Path[AttentionSpec]):
    """One way to run attention over queries that are rotated, with keys and values in the cache."""

    start: Callable[[AttentionSpec, Gpu, Tensor, PagedKv, AttentionBatch, Tensor | None], Tensor]


@dataclass(frozen=True)
class FusedPath(Path[AttentionSpec]):
    """One way to run attention straight from the projection: norms, rotation and KV write in the same launch."""

    start: Callable[[AttentionSpec, Gpu, Tensor, HeadTransform, PagedKv, AttentionBatch, Tensor | None], Tensor]


class AttentionOp(Implementation[AttentionSpec]):
    """There are no weights to pack: keys and values lie in the pages of the cache."""

    op = "attention"
    layout = "paged"
    paths: tuple[AttentionPath, ...]
    fused_paths: tuple[FusedPath, ...] = ()
    """The ways of ``run_fused``; none where there is no such form."""

    def run(
        self, spec: AttentionSpec, gpu: Gpu, q: Tensor, kv: PagedKv, batch: AttentionBatch, sinks: Tensor | None,
        path: AttentionPath,
    ) -> Tensor:  # fmt: skip
        """``q [tokens, heads, head_dim]`` → the same shape and type, by ``path``."""
        return path.start(spec, gpu, q, kv, batch, sinks)

    def run_fused(
        self, spec: AttentionSpec, gpu: Gpu, qkv: Tensor, transform: HeadTransform, kv: PagedKv,
        batch: AttentionBatch, sinks: Tensor | None, path: FusedPath,
    ) -> Tensor:  # fmt: skip
        """What ``small.rope_and_write_kv`` and ``run`` do, of ``qkv [tokens, all heads, head_dim]``, by ``path``.
        Position and slot of each token follow from its sequence's length and pages."""
        return path.start(spec, gpu, qkv, transform, kv, batch, sinks)
