"""Layers that are bound to their weights and to what the oracle chose. Calling one runs just that.

Layers of one kind share a ``…Kind``: what was picked for a kind of batch holds for all of them. A fused form is asked
for before it is called: ``why_not_…`` says why a batch has to take the ops apart, or ``None``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from microscale.errors import Unsupported
from microscale.kernels.attention.fused_decode import HeadTransform
from microscale.kernels.attention.op import AttentionOp, AttentionPath, FusedPath
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, BatchShape, HeadsKind, PagedKv
from microscale.kernels.dense.packed import PackedDense
from microscale.kernels.dense.spec import (
    DenseOp,
    DensePath,
    DenseSpec,
    DenseWeights,
    Logits,
    LogitsPath,
    Summed,
    SumPath,
)
from microscale.kernels.moe.spec import (
    Mlp,
    MlpPath,
    MlpSpec,
    MoeOp,
    MoePath,
    MoeSpec,
    MoeWeights,
    Parts,
    PartsPath,
    Routing,
)
from microscale.kernels.op import Reason
from microscale.kernels.sampling.spec import (
    Sampled,
    SamplingBatch,
    SamplingFeatures,
    SamplingOp,
    SamplingPath,
    SamplingSpec,
    ScorePath,
)
from microscale.kernels.small.spec import (
    HeadNorms,
    NormAddNorm,
    NormAddNormRoutePath,
    RopeTable,
    Routed,
    RoutePath,
    Router,
    RouterShape,
    SmallOps,
    SmallSpec,
)
from microscale.planning.path_cache import LayerChoice, PathCache
from microscale.planning.paths import path_for
from microscale.planning.quantise import Weight, take_rows

if TYPE_CHECKING:
    from torch import Tensor

MlpPicks = PathCache[int, tuple[MoeOp[Any], MoeSpec, MlpPath[Any]] | Reason]


class MoeKind:
    """All expert layers of one kind."""

    def __init__(self, choice: LayerChoice[MoeOp[Any], MoeSpec]) -> None:
        self.choice = choice
        self.runs: PathCache[int, tuple[MoeOp[Any], MoeSpec, MoePath[Any]]] = PathCache(
            lambda tokens: choice.picked(lambda entry: entry.paths, tokens)
        )
        self.parts: PathCache[int, tuple[MoeOp[Any], MoeSpec, PartsPath[Any]] | Reason] = PathCache(
            lambda tokens: choice.fused(lambda entry: entry.parts_paths, tokens)
        )
        self._with_mlp: dict[MlpSpec, MlpPicks] = {}

    def with_mlp(self, mlp: MlpSpec) -> MlpPicks:
        """What is picked where this MLP shall run with the experts."""
        if mlp not in self._with_mlp:
            self._with_mlp[mlp] = PathCache(lambda tokens: self.choice.fused(lambda op: op.mlp_paths, tokens, mlp=mlp))
        return self._with_mlp[mlp]


class Moe:
    """A bound expert layer."""

    def __init__(self, kind: MoeKind, weights: MoeWeights) -> None:
        self._kind = kind
        self._gpu = kind.choice.gpu
        self._packed = kind.choice.implementations[0].pack(weights, kind.choice.specs[0])
        self._mlp: tuple[Mlp | None, MlpPicks] | None = None

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        entry, spec, path = self._kind.runs[x.shape[0]]
        return entry.run(self._packed, spec, self._gpu, x, routing, path)

    def why_not_parts(self, tokens: int) -> Reason | None:
        """Why a batch of so many tokens is to be called and adds up a token's experts by itself; ``None``: ``parts``
        leaves that to the reader."""
        found = self._kind.parts[tokens]
        return found if isinstance(found, str) else None

    def parts(self, x: Tensor, routing: Routing) -> Parts:
        """As a call, but for the sum over a token's experts. The norms of ``Small`` take it as it is."""
        found = self._kind.parts[x.shape[0]]
        if isinstance(found, str):
            raise Unsupported(f"The experts cannot be left apart: {found}; check why_not_parts first.")
        entry, spec, path = found
        return entry.run_parts(self._packed, spec, self._gpu, x, routing, path)

    def bind_mlp(self, gate_up: Dense, down: Dense) -> None:
        """Name the dense MLP of the same gate that reads and adds to the same residual stream. Rows of ``gate_up`` come
        in runs of ``MLP_RUN``."""
        hidden, units = self._kind.choice.specs[0].hidden, down.spec.columns
        if (gate_up.spec.rows, gate_up.spec.columns, down.spec.rows) != (2 * units, hidden, hidden):
            raise Unsupported(f"An MLP beside experts of {hidden} columns cannot be {gate_up.spec} and {down.spec}.")
        first, second = gate_up.packed, down.packed
        packed = Mlp(first, second) if isinstance(first, PackedDense) and isinstance(second, PackedDense) else None
        formats = dict.fromkeys(layer.spec.weight_format for layer in (gate_up, down))
        bias = gate_up.spec.bias or down.spec.bias
        spec = MlpSpec(units, " and ".join(formats), packed is not None, bias)
        self._mlp = packed, self._kind.with_mlp(spec)

    def why_not_mlp(self, tokens: int) -> Reason | None:
        """Why a batch of so many tokens takes the bound MLP and the experts apart; ``None``: ``with_mlp`` runs both."""
        if self._mlp is None:
            return "no MLP was bound to the experts"
        found = self._mlp[1][tokens]
        return found if isinstance(found, str) else None

    def with_mlp(self, x: Tensor, routing: Routing) -> Tensor:
        """The bound MLP in the experts' own launches: ``x [2, tokens, hidden]``, for the MLP and for the experts →
        both answers."""
        mlp, picks = self._mlp or (None, None)
        if mlp is None or picks is None or isinstance(found := picks[x.shape[1]], str):
            reason = self.why_not_mlp(x.shape[1])
            raise Unsupported(f"The MLP cannot run with the experts: {reason}; check why_not_mlp first.")
        entry, spec, path = found
        return entry.run_with_mlp(self._packed, mlp, spec, self._gpu, x, routing, path)


class DenseKind:
    """All dense layers of one kind."""

    def __init__(self, choice: LayerChoice[DenseOp[Any], DenseSpec]) -> None:
        self.choice = choice
        self.runs: PathCache[int, tuple[DenseOp[Any], DenseSpec, DensePath[Any]]] = PathCache(
            lambda tokens: choice.picked(lambda entry: entry.paths, tokens)
        )
        self.logits: PathCache[int, tuple[DenseOp[Any], DenseSpec, LogitsPath[Any]]] = PathCache(
            lambda tokens: choice.picked(lambda entry: entry.logits_paths, tokens)
        )
        self.sums: PathCache[int, tuple[DenseOp[Any], DenseSpec, SumPath[Any]] | Reason] = PathCache(
            lambda tokens: choice.fused(lambda entry: entry.sum_paths, tokens)
        )


class Dense:
    """A bound dense layer."""

    def __init__(self, kind: DenseKind, weights: DenseWeights) -> None:
        self._kind = kind
        self._gpu = kind.choice.gpu
        self._packed = kind.choice.implementations[0].pack(weights, kind.choice.specs[0])

    @property
    def spec(self) -> DenseSpec:
        """The layer as it is held."""
        return self._kind.choice.specs[0]

    @property
    def packed(self) -> object:
        """The weights as the implementation has them."""
        return self._packed

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        entry, spec, path = self._kind.runs[x.shape[0]]
        return entry.run(self._packed, spec, self._gpu, x, residual, path)

    def logits(self, x: Tensor) -> Logits:
        """As an lm_head: float32, with what sampling wants of each block of rows."""
        entry, spec, path = self._kind.logits[x.shape[0]]
        return entry.run_logits(self._packed, spec, self._gpu, x, path)

    def why_not_fused_norm(self, tokens: int) -> Reason | None:
        """Why so many tokens are added and normed by ``small.add_rms_norm`` first; ``None``: ``from_sum`` does it."""
        found = self._kind.sums[tokens]
        return found if isinstance(found, str) else None

    def from_sum(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """As ``small.add_rms_norm`` and a call, in one launch: the layer of the norm, and the sum."""
        found = self._kind.sums[x.shape[0]]
        if isinstance(found, str):
            raise Unsupported(f"The layer cannot take a sum: {found}; check why_not_fused_norm first.")
        entry, spec, path = found
        return entry.run_from_sum(self._packed, spec, self._gpu, Summed(x, residual, weight, epsilon), path)


BatchKey: TypeAlias = "tuple[int, tuple[int, int, int], torch.dtype, bool]"
"""Tokens, ``AttentionBatch.sizes``, how keys are stored, and whether drafts are verified."""
HeadsKey = tuple[BatchKey, HeadsKind]


def _batch_key(tokens: int, kv: PagedKv, batch: AttentionBatch) -> BatchKey:
    return tokens, batch.sizes, kv.k.dtype, batch.verify


def _shape(key: BatchKey, heads: HeadsKind | None = None) -> BatchShape:
    return BatchShape(*key[1], key[2] == torch.uint8, heads, key[3])


class AttentionKind:
    """All attention layers of one kind."""

    def __init__(self, choice: LayerChoice[AttentionOp, AttentionSpec]) -> None:
        self.choice = choice
        self.runs: PathCache[BatchKey, tuple[AttentionOp, AttentionSpec, AttentionPath]] = PathCache(
            lambda key: choice.picked(lambda entry: entry.paths, key[0], batch=_shape(key))
        )
        self.fused: PathCache[HeadsKey, tuple[AttentionOp, AttentionSpec, FusedPath] | Reason] = PathCache(
            lambda key: choice.fused(lambda entry: entry.fused_paths, key[0][0], batch=_shape(*key))
        )


class Attention:
    """A bound attention layer."""

    def __init__(self, kind: AttentionKind, sinks: Tensor | None) -> None:
        self._kind = kind
        self._gpu = kind.choice.gpu
        spec = kind.choice.specs[0]
        self._shared_heads = spec.num_heads + spec.num_kv_heads
        self._sinks = sinks

    def __call__(self, q: Tensor, kv: PagedKv, batch: AttentionBatch) -> Tensor:
        entry, spec, path = self._kind.runs[_batch_key(q.shape[0], kv, batch)]
        return entry.run(spec, self._gpu, q, kv, batch, self._sinks, path)

    def _heads_key(self, qkv: Tensor, norms: HeadNorms | None, kv: PagedKv, batch: AttentionBatch) -> HeadsKey:
        tokens, heads, _ = qkv.shape
        kind = norms is not None, norms is not None and norms.values, heads == self._shared_heads
        return _batch_key(tokens, kv, batch), kind

    def why_not_fused_heads(
        self, qkv: Tensor, norms: HeadNorms | None, kv: PagedKv, batch: AttentionBatch
    ) -> Reason | None:
        """Why a batch's heads are rotated and written by ``small.rope_and_write_kv`` first; ``None``: ``from_heads``
        does it all."""
        found = self._kind.fused[self._heads_key(qkv, norms, kv, batch)]
        return found if isinstance(found, str) else None

    def from_heads(
        self, qkv: Tensor, rope: RopeTable, norms: HeadNorms | None, kv: PagedKv, batch: AttentionBatch
    ) -> Tensor:
        """As ``small.rope_and_write_kv`` and a call, in one launch: ``qkv [tokens, heads and KV heads, head_dim]``, one
        token of each sequence."""
        key = self._heads_key(qkv, norms, kv, batch)
        found = self._kind.fused[key]
        if isinstance(found, str):
            raise Unsupported(f"Attention cannot take these heads: {found}; check why_not_fused_heads first.")
        entry, spec, path = found
        transform = HeadTransform(rope, norms, shared=key[1][2])
        return entry.run_fused(spec, self._gpu, qkv, transform, kv, batch, self._sinks, path)


class SmallKind:
    """The small ops of one kind of layers."""

    def __init__(self, choice: LayerChoice[SmallOps, SmallSpec]) -> None:
        # One implementation for all sizes: they have no weights to share a layout of.
        gpu, spec, chosen = choice.gpu, choice.specs[0], choice.implementations[0]
        self.ops = chosen.on(gpu)

        def routed(tokens: int, router: RouterShape) -> SmallSpec:
            return replace(spec, tokens=tokens, router=router)

        self.routes: PathCache[tuple[int, bool, bool], RoutePath] = PathCache(
            lambda key: path_for(chosen.route_paths, routed(key[0], RouterShape(*key[1:])), gpu)
        )
        self.norm_add_norm_routes: PathCache[tuple[int, bool, bool, int], NormAddNormRoutePath] = PathCache(
            lambda key: path_for(chosen.norm_add_norm_route_paths, routed(key[0], RouterShape(*key[1:])), gpu)
        )


class Small:
    """The small ops, bound to a GPU. What each computes is in ``kernels/small/reference.py``."""

    def __init__(self, kind: SmallKind) -> None:
        self._kind = kind
        # As they are: a call costs nothing more.
        ops = kind.ops
        self.rms_norm, self.add_rms_norm = ops.rms_norm, ops.add_rms_norm
        self.add_rms_norm_mxfp8 = ops.add_rms_norm_mxfp8
        self.norm_add_norm, self.rope_and_write_kv = ops.norm_add_norm, ops.rope_and_write_kv
        self.route, self.gated = ops.route, ops.gated
        self.norm_pair, self.likeliest = ops.norm_pair, ops.likeliest

    def add_norm_route(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, router: Router, top_k: int
    ) -> Routed:
        """``x + residual`` normalised, the sum, and the experts that the router chooses for the norm."""
        path = self._kind.routes[x.shape[0], router.bias is not None, router.expert_scale is not None]
        return self._kind.ops.add_norm_route(x, residual, weight, epsilon, router, top_k, path)

    def norm_add_norm_route(
        self, x: Tensor, residual: Tensor, around: NormAddNorm, router: Router, top_k: int
    ) -> Routed:
        """As ``norm_add_norm`` of one part, whose last reader is the router: norms of the others, sum, and experts."""
        has = router.bias is not None, router.expert_scale is not None
        path = self._kind.norm_add_norm_routes[x.shape[0], *has, around.after.shape[0] - 1]
        return self._kind.ops.norm_add_norm_route(x, residual, around, router, top_k, path)


class Embedding:
    """A bound embedding table: token ids → rows."""

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        self._weight = weight
        self._dtype = dtype

    @property
    def table(self) -> Tensor | None:
        """The rows as they are, for kernels that look them up by themselves; ``None`` where they are coded."""
        return self._weight if isinstance(self._weight, torch.Tensor) else None

    def __call__(self, token_ids: Tensor) -> Tensor:
        return take_rows(self._weight, token_ids, self._dtype)


class Sampling:
    """Sampling from one vocabulary."""

    def __init__(self, choice: LayerChoice[SamplingOp, SamplingSpec]) -> None:
        self._gpu = choice.gpu
        self._runs: PathCache[tuple[int, SamplingFeatures], tuple[SamplingOp, SamplingSpec, SamplingPath]] = PathCache(
            lambda key: choice.picked(lambda entry: entry.paths, key[0], features=key[1])
        )
        self._scores: PathCache[tuple[int, SamplingFeatures], tuple[SamplingOp, SamplingSpec, ScorePath]] = PathCache(
            lambda key: choice.picked(lambda entry: entry.score_paths, key[0], features=key[1])
        )

    def __call__(self, logits: Tensor, batch: SamplingBatch, blocks: Logits | None = None) -> Sampled:
        entry, spec, path = self._runs[logits.shape[0], batch.features(blocks)]
        return entry.run(spec, self._gpu, logits, batch, blocks, path)

    def score(self, logits: Tensor, tokens: Tensor, top_logprobs: int) -> Sampled:
        """Log-probabilities of given tokens."""
        entry, spec, path = self._scores[logits.shape[0], SamplingFeatures(tops=top_logprobs > 0)]
        return entry.score(spec, self._gpu, logits, tokens, top_logprobs, path)
