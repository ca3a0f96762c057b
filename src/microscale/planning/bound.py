"""Layers that are bound to their weights and to what the oracle chose. Calling one runs just that.

Layers of one kind share a ``…Kind``: the path picked for a kind of batch holds for all of them. Before a fused form is
called, ``why_not_…`` says why a batch has to take the ops apart, or gives ``None``.
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
from microscale.kernels.recurrent.spec import (
    RecurrentOp,
    RecurrentPath,
    RecurrentSpec,
    RecurrentWeights,
    StateBatch,
    StateCache,
    StepShape,
)
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
from microscale.planning.path_cache import FusedPathCache, LayerChoice, PathCache
from microscale.planning.paths import path_for
from microscale.planning.quantise import Weight, take_rows

if TYPE_CHECKING:
    from torch import Tensor

MlpPaths = FusedPathCache[int, tuple[MoeOp[Any], MoeSpec, MlpPath[Any]]]


class MoeKind:
    """All expert layers of one kind."""

    def __init__(self, choice: LayerChoice[MoeOp[Any], MoeSpec]) -> None:
        self.choice = choice
        self.runs: PathCache[int, tuple[MoeOp[Any], MoeSpec, MoePath[Any]]] = PathCache(
            lambda tokens: choice.path(lambda entry: entry.paths, tokens)
        )
        self.parts: FusedPathCache[int, tuple[MoeOp[Any], MoeSpec, PartsPath[Any]]] = FusedPathCache(
            lambda tokens: choice.fused_path(lambda entry: entry.parts_paths, tokens)
        )
        self._with_mlp: dict[MlpSpec, MlpPaths] = {}

    def with_mlp(self, mlp: MlpSpec) -> MlpPaths:
        """The paths where this MLP runs with the experts."""
        if mlp not in self._with_mlp:
            self._with_mlp[mlp] = FusedPathCache(
                lambda tokens: self.choice.fused_path(lambda op: op.mlp_paths, tokens, mlp=mlp)
            )
        return self._with_mlp[mlp]


class Moe:
    """A bound expert layer."""

    def __init__(self, kind: MoeKind, weights: MoeWeights) -> None:
        self._kind = kind
        self._gpu = kind.choice.gpu
        self._packed = kind.choice.implementations[0].pack(weights, kind.choice.specs[0])
        self._mlp: tuple[Mlp | None, MlpPaths] | None = None

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        entry, spec, path = self._kind.runs[x.shape[0]]
        return entry.run(self._packed, spec, self._gpu, x, routing, path)

    def why_not_parts(self, tokens: int) -> Reason | None:
        """``None``: for this many tokens ``parts`` leaves the sum over a token's experts to the reader."""
        return self._kind.parts.why_not(tokens)

    def parts(self, x: Tensor, routing: Routing) -> Parts:
        """Like a call, without the sum over a token's experts. The norms of ``Small`` take it as it is."""
        entry, spec, path = self._kind.parts.need(x.shape[0], "why_not_parts")
        return entry.run_parts(self._packed, spec, self._gpu, x, routing, path)

    def bind_mlp(self, gate_up: Dense, down: Dense) -> None:
        """Name the dense MLP of the same gate that reads and adds to the same residual stream. Rows of ``gate_up`` come
        in runs of ``MLP_RUN``."""
        hidden, units = self._kind.choice.specs[0].hidden, down.spec.columns
        if (gate_up.spec.rows, gate_up.spec.columns, down.spec.rows) != (2 * units, hidden, hidden):
            raise Unsupported(f"An MLP next to experts of {hidden} columns cannot be {gate_up.spec} and {down.spec}.")
        first, second = gate_up.packed, down.packed
        packed = Mlp(first, second) if isinstance(first, PackedDense) and isinstance(second, PackedDense) else None
        formats = dict.fromkeys(layer.spec.weight_format for layer in (gate_up, down))
        bias = gate_up.spec.bias or down.spec.bias
        spec = MlpSpec(units, " and ".join(formats), packed is not None, bias)
        self._mlp = packed, self._kind.with_mlp(spec)

    def why_not_mlp(self, tokens: int) -> Reason | None:
        """``None``: for this many tokens ``with_mlp`` runs the bound MLP and the experts."""
        return "no MLP was bound to the experts" if self._mlp is None else self._mlp[1].why_not(tokens)

    def with_mlp(self, x: Tensor, routing: Routing) -> Tensor:
        """The bound MLP in the experts' own launches: ``x [2, tokens, hidden]``, for the MLP and for the experts →
        both results."""
        mlp, paths = self._mlp or (None, None)
        if paths is None:
            raise Unsupported("No MLP was bound to the experts; check why_not_mlp first.")
        entry, spec, path = paths.need(x.shape[1], "why_not_mlp")
        assert mlp is not None  # a path refuses an MLP that is not packed
        return entry.run_with_mlp(self._packed, mlp, spec, self._gpu, x, routing, path)


class DenseKind:
    """All dense layers of one kind."""

    def __init__(self, choice: LayerChoice[DenseOp[Any], DenseSpec]) -> None:
        self.choice = choice
        self.runs: PathCache[int, tuple[DenseOp[Any], DenseSpec, DensePath[Any]]] = PathCache(
            lambda tokens: choice.path(lambda entry: entry.paths, tokens)
        )
        self.logits: PathCache[int, tuple[DenseOp[Any], DenseSpec, LogitsPath[Any]]] = PathCache(
            lambda tokens: choice.path(lambda entry: entry.logits_paths, tokens)
        )
        self.sums: FusedPathCache[int, tuple[DenseOp[Any], DenseSpec, SumPath[Any]]] = FusedPathCache(
            lambda tokens: choice.fused_path(lambda entry: entry.sum_paths, tokens)
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
        """``None``: for this many tokens ``from_sum`` adds and norms; otherwise ``small.add_rms_norm`` runs first."""
        return self._kind.sums.why_not(tokens)

    def from_sum(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """``small.add_rms_norm`` and a call in one launch: the layer of the norm, and the sum."""
        entry, spec, path = self._kind.sums.need(x.shape[0], "why_not_fused_norm")
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
            lambda key: choice.path(lambda entry: entry.paths, key[0], batch=_shape(key))
        )
        self.fused: FusedPathCache[HeadsKey, tuple[AttentionOp, AttentionSpec, FusedPath]] = FusedPathCache(
            lambda key: choice.fused_path(lambda entry: entry.fused_paths, key[0][0], batch=_shape(*key))
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
        """``None``: ``from_heads`` does it all; otherwise ``small.rope_and_write_kv`` runs first."""
        return self._kind.fused.why_not(self._heads_key(qkv, norms, kv, batch))

    def from_heads(
        self, qkv: Tensor, rope: RopeTable, norms: HeadNorms | None, kv: PagedKv, batch: AttentionBatch
    ) -> Tensor:
        """``small.rope_and_write_kv`` and a call in one launch: ``qkv [tokens, heads and KV heads, head_dim]``, one
        token of each sequence."""
        key = self._heads_key(qkv, norms, kv, batch)
        entry, spec, path = self._kind.fused.need(key, "why_not_fused_heads")
        transform = HeadTransform(rope, norms, shared=key[1][2])
        return entry.run_fused(spec, self._gpu, qkv, transform, kv, batch, self._sinks, path)


class RecurrentKind:
    """All layers with states of one kind."""

    def __init__(self, choice: LayerChoice[RecurrentOp, RecurrentSpec]) -> None:
        self.choice = choice
        self.runs: PathCache[tuple[int, StepShape], tuple[RecurrentOp, RecurrentSpec, RecurrentPath]] = PathCache(
            lambda key: choice.path(lambda entry: entry.paths, key[0], step=key[1])
        )


class Recurrent:
    """A bound layer with states."""

    def __init__(self, kind: RecurrentKind, weights: RecurrentWeights) -> None:
        self._kind = kind
        self._gpu = kind.choice.gpu
        self._weights = weights

    def __call__(self, projected: Tensor, x: Tensor, cache: StateCache, batch: StateBatch) -> Tensor:
        entry, spec, path = self._kind.runs[projected.shape[0], batch.shape]
        return entry.run(spec, self._gpu, projected, x, self._weights, cache, batch, path)


class SmallKind:
    """The small ops of one kind of layers."""

    def __init__(self, choice: LayerChoice[SmallOps, SmallSpec]) -> None:
        # One implementation for all sizes: they have no weights to share a layout of.
        gpu, spec, chosen = choice.gpu, choice.specs[0], choice.implementations[0]
        self.ops = chosen.on(gpu)

        def routed(tokens: int, router: RouterShape) -> SmallSpec:
            return replace(spec, tokens=tokens, router=router)

        self.routes: PathCache[tuple[int, RouterShape], RoutePath] = PathCache(
            lambda key: path_for(chosen.route_paths, routed(*key), gpu)
        )
        self.norm_add_norm_routes: PathCache[tuple[int, RouterShape], NormAddNormRoutePath] = PathCache(
            lambda key: path_for(chosen.norm_add_norm_route_paths, routed(*key), gpu)
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
        self.route, self.gated, self.gate_heads = ops.route, ops.gated, ops.gate_heads
        self.norm_pair, self.likeliest = ops.norm_pair, ops.likeliest

    def add_norm_route(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, router: Router, top_k: int
    ) -> Routed:
        """``x + residual`` normalised, the sum, and the experts that the router chooses for the norm."""
        path = self._kind.routes[x.shape[0], router.shape()]
        return self._kind.ops.add_norm_route(x, residual, weight, epsilon, router, top_k, path)

    def norm_add_norm_route(
        self, x: Tensor, residual: Tensor, around: NormAddNorm, router: Router, top_k: int
    ) -> Routed:
        """As ``norm_add_norm`` of one part, whose last reader is the router: norms of the others, sum, and experts."""
        path = self._kind.norm_add_norm_routes[x.shape[0], router.shape(around.after.shape[0] - 1)]
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
            lambda key: choice.path(lambda entry: entry.paths, key[0], features=key[1])
        )
        self._scores: PathCache[tuple[int, SamplingFeatures], tuple[SamplingOp, SamplingSpec, ScorePath]] = PathCache(
            lambda key: choice.path(lambda entry: entry.score_paths, key[0], features=key[1])
        )

    def __call__(self, logits: Tensor, batch: SamplingBatch, blocks: Logits | None = None) -> Sampled:
        entry, spec, path = self._runs[logits.shape[0], batch.features(blocks)]
        return entry.run(spec, self._gpu, logits, batch, blocks, path)

    def score(self, logits: Tensor, tokens: Tensor, top_logprobs: int) -> Sampled:
        """Log-probabilities of given tokens."""
        entry, spec, path = self._scores[logits.shape[0], SamplingFeatures(tops=top_logprobs > 0)]
        return entry.score(spec, self._gpu, logits, tokens, top_logprobs, path)
