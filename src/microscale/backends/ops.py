"""What models call. A model asks for an op with its weights and gets back something to call with tokens.

``Ops`` is made once per model with the GPU, the activations' type and the user's wishes. Binding a layer decides which
implementation runs it, packs the weights for that, and enters the decision in ``plan``; calling it runs just that.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from microscale.backends import registry
from microscale.backends.decision import Plan
from microscale.backends.oracle import Spec, Wish, decide_layer
from microscale.hardware import Gpu
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, PagedKv
from microscale.kernels.dense.spec import DenseSpec, DenseWeights
from microscale.kernels.moe.spec import Gate, GateKind, MoeSpec, MoeWeights, Routing
from microscale.kernels.op import Activations, torch_dtype
from microscale.kernels.small.spec import RopeTable, SmallOps, SmallSpec

BUCKETS = (1, 4, 16, 64, 256, 1024, 8192)
"""Batch sizes for which a decision is made; a batch takes the decision of the next size up, the largest beyond that."""


@dataclass(frozen=True)
class _Choice:
    """The specs and implementations of one bound layer, by bucket."""

    specs: tuple[Any, ...]
    implementations: tuple[Any, ...]

    def pick(self, tokens: int) -> tuple[Any, Any]:
        bucket = min(bisect_left(BUCKETS, tokens), len(BUCKETS) - 1)
        return self.implementations[bucket], replace(self.specs[bucket], tokens=tokens)


class Moe:
    """A bound expert layer."""

    def __init__(self, choice: _Choice, gpu: Gpu, weights: MoeWeights) -> None:
        self._choice = choice
        self._gpu = gpu
        self._packed = choice.implementations[0].pack(weights, choice.specs[0])

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        implementation, spec = self._choice.pick(x.shape[0])
        return implementation.run(self._packed, spec, self._gpu, x, routing)  # type: ignore[no-any-return]


class Dense:
    """A bound dense layer."""

    def __init__(self, choice: _Choice, gpu: Gpu, weights: DenseWeights) -> None:
        self._choice = choice
        self._gpu = gpu
        self._packed = choice.implementations[0].pack(weights, choice.specs[0])

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        implementation, spec = self._choice.pick(x.shape[0])
        return implementation.run(self._packed, spec, self._gpu, x, residual)  # type: ignore[no-any-return]


class Attention:
    """A bound attention layer."""

    def __init__(self, choice: _Choice, gpu: Gpu, sinks: Tensor | None) -> None:
        self._choice = choice
        self._gpu = gpu
        self._sinks = sinks

    def __call__(self, q: Tensor, kv: PagedKv, batch: AttentionBatch) -> Tensor:
        implementation, spec = self._choice.pick(q.shape[0])
        return implementation.run(spec, self._gpu, q, kv, batch, self._sinks)  # type: ignore[no-any-return]


class Ops:
    """The ops of one model on one device."""

    def __init__(self, gpu: Gpu, activations: Activations, wish: Wish) -> None:
        wish.check()
        self.gpu = gpu
        self.activations = activations
        self.wish = wish
        self.plan = Plan()

    @property
    def dtype(self) -> torch.dtype:
        """The type in which activations travel."""
        return torch_dtype(self.activations)

    def moe(self, weights: MoeWeights, top_k: int, gate: Gate) -> Moe:
        experts, rows, hidden = weights.gate_up.shape
        has_bias = weights.gate_up_bias is not None
        spec = self.moe_spec(experts, top_k, hidden, rows // 2, weights.gate_up.format.name, gate, has_bias)
        return Moe(self._choose("moe", "experts", spec), self.gpu, weights)

    def moe_spec(
        self, experts: int, top_k: int, hidden: int, intermediate: int, weight_format: str, gate: Gate, bias: bool
    ) -> MoeSpec:
        """The spec of an expert layer of this model, before its weights are there."""
        return MoeSpec(experts, top_k, hidden, intermediate, weight_format, self.activations, gate, bias, tokens=1)

    def dense(self, layer: str, weights: DenseWeights) -> Dense:
        rows, columns = weights.weight.shape
        spec = self.dense_spec(rows, columns, weights.format, weights.bias is not None)
        return Dense(self._choose("dense", layer, spec), self.gpu, weights)

    def dense_spec(self, rows: int, columns: int, weight_format: str = "bf16", bias: bool = False) -> DenseSpec:
        """The spec of a dense layer of this model, before its weights are there."""
        return DenseSpec(rows, columns, weight_format, self.activations, bias, tokens=1)

    def packed_bytes(self, op: str, spec: Spec) -> int:
        """Bytes that a layer's weights will take in the layout that will be chosen for them."""
        chosen = self._choose(op, "sizing", spec, keep=False)
        return int(chosen.implementations[0].packed_bytes(chosen.specs[0]))

    def attention(self, layer: str, spec: AttentionSpec, sinks: Tensor | None) -> Attention:
        return Attention(self._choose("attention", layer, spec), self.gpu, sinks)

    def small(self, spec: SmallSpec) -> SmallOps:
        """Norms, rope, KV write and routing: one implementation for all of them."""
        implementation = self._choose("small", "small", spec).implementations[0]
        assert isinstance(implementation, SmallOps)  # the registry files it under this op
        return implementation

    def _choose(self, op: str, layer: str, spec: Spec, keep: bool = True) -> _Choice:
        specs = tuple(replace(spec, tokens=tokens) for tokens in BUCKETS)  # type: ignore[type-var]
        decisions = decide_layer(op, layer, specs, self.gpu, self.wish)
        if keep:
            self.plan.add(decisions)
        return _Choice(specs, tuple(registry.find(op, decision.chosen) for decision in decisions))


__all__ = [
    "BUCKETS",
    "Activations",
    "Attention",
    "AttentionBatch",
    "AttentionSpec",
    "Dense",
    "DenseWeights",
    "Gate",
    "GateKind",
    "Moe",
    "MoeWeights",
    "Ops",
    "PagedKv",
    "RopeTable",
    "Routing",
    "SmallOps",
    "SmallSpec",
    "Wish",
]
