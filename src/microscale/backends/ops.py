"""What models call. A model asks for an op with its weights and gets back something to call with tokens.

``Ops`` is made once per model with the GPU, the activations' type, the user's wishes and precision. Binding a layer
takes its decision from ``plan`` (or makes it there), brings the weights into the format of the precision, packs them
for the implementation, and calling it runs just that. Weights change format layer by layer, on the device.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from microscale.backends import registry
from microscale.backends.beside import Beside
from microscale.backends.decision import Plan
from microscale.backends.oracle import Spec, Wish
from microscale.backends.plan import BUCKETS, Setup, Use, decide_use, uncapturable
from microscale.backends.precision import EXACT, Precision
from microscale.backends.quantise import Weight, convert, format_name, take_rows
from microscale.formats import BlockScaled
from microscale.hardware import Gpu
from microscale.kernels.attention.fused_decode import HeadTransform
from microscale.kernels.attention.paged import PagedAttention
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, PagedKv
from microscale.kernels.dense.packed import PackedDense
from microscale.kernels.dense.spec import DenseSpec, DenseWeights, Logits
from microscale.kernels.launch import Kernel, recording
from microscale.kernels.moe.spec import Gate, GateKind, MoeSpec, MoeWeights, Routing
from microscale.kernels.moe.w8a16 import TritonW8A16
from microscale.kernels.moe.with_mlp import RUN as MLP_RUN
from microscale.kernels.op import Activations, torch_dtype
from microscale.kernels.sampling.spec import (
    MAX_TOP_LOGPROBS,
    PROMPT_BIT,
    Bias,
    History,
    Sampled,
    SamplingBatch,
    SamplingSpec,
    Status,
)
from microscale.kernels.small.spec import HeadNorms, RopeTable, Router, Sandwich, SmallOps, SmallSpec

MAX_PICKED = 1024
"""Numbers of tokens that a layer remembers what it picked for: decoding has few, prompts may have any."""


@dataclass(frozen=True)
class _Choice:
    """The specs and implementations of one bound layer, by bucket."""

    specs: tuple[Any, ...]
    implementations: tuple[Any, ...]
    picked: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """Tokens → what was picked for them: every layer of every step asks."""

    def pick(self, tokens: int) -> tuple[Any, Any]:
        found = self.picked.get(tokens)
        if found is None:
            bucket = min(bisect_left(BUCKETS, tokens), len(BUCKETS) - 1)
            found = self.implementations[bucket], replace(self.specs[bucket], tokens=tokens)
            if len(self.picked) == MAX_PICKED:
                self.picked.clear()
            self.picked[tokens] = found
        return found


class Moe:
    """A bound expert layer."""

    def __init__(self, choice: _Choice, gpu: Gpu, weights: MoeWeights) -> None:
        self._choice = choice
        self._gpu = gpu
        self._packed = choice.implementations[0].pack(weights, choice.specs[0])

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        implementation, spec = self._choice.pick(x.shape[0])
        return implementation.run(self._packed, spec, self._gpu, x, routing)  # type: ignore[no-any-return]

    def with_mlp(self, gate_up: Dense, down: Dense, x: Tensor, routing: Routing) -> Tensor | None:
        """A dense MLP of the same gate in the experts' own launches, where there are such: ``x [2, tokens, hidden]``,
        for the MLP and for the experts → both answers. Rows of ``gate_up`` come in runs of ``MLP_RUN``."""
        implementation, spec = self._choice.pick(x.shape[1])
        mlp = (gate_up.packed, down.packed)
        if not isinstance(implementation, TritonW8A16) or not all(isinstance(part, PackedDense) for part in mlp):
            return None
        return implementation.run_with_mlp(self._packed, mlp, spec, self._gpu, x, routing)


class Dense:
    """A bound dense layer."""

    def __init__(self, choice: _Choice, gpu: Gpu, weights: DenseWeights) -> None:
        self._choice = choice
        self._gpu = gpu
        self._packed = choice.implementations[0].pack(weights, choice.specs[0])

    @property
    def packed(self) -> Any:
        """The weights as the implementation has them."""
        return self._packed

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        implementation, spec = self._choice.pick(x.shape[0])
        return implementation.run(self._packed, spec, self._gpu, x, residual)  # type: ignore[no-any-return]

    def logits(self, x: Tensor) -> Logits:
        """As an lm_head: float32, with what sampling wants of each block of rows."""
        implementation, spec = self._choice.pick(x.shape[0])
        return implementation.run_logits(self._packed, spec, self._gpu, x)  # type: ignore[no-any-return]


class Attention:
    """A bound attention layer."""

    def __init__(self, choice: _Choice, gpu: Gpu, sinks: Tensor | None) -> None:
        self._choice = choice
        self._gpu = gpu
        self._sinks = sinks

    def __call__(self, q: Tensor, kv: PagedKv, batch: AttentionBatch) -> Tensor:
        implementation, spec = self._choice.pick(q.shape[0])
        return implementation.run(spec, self._gpu, q, kv, batch, self._sinks)  # type: ignore[no-any-return]

    def from_heads(
        self, qkv: Tensor, rope: RopeTable, norms: HeadNorms | None, kv: PagedKv, batch: AttentionBatch
    ) -> Tensor | None:
        """As ``small.rope_and_write_kv`` and a call, in one launch where there is such: ``qkv [tokens, heads and KV
        heads, head_dim]``, one token of each sequence."""
        implementation, spec = self._choice.pick(qkv.shape[0])
        if not isinstance(implementation, PagedAttention):
            return None
        transform = HeadTransform(rope, norms, shared=qkv.shape[1] == spec.num_heads + spec.num_kv_heads)
        return implementation.run_fused(spec, self._gpu, qkv, transform, kv, batch, self._sinks)


class Embedding:
    """A bound embedding table: token ids → rows."""

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        self._weight = weight
        self._dtype = dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        return take_rows(self._weight, token_ids, self._dtype)


class Sampling:
    """Sampling from one vocabulary."""

    def __init__(self, choice: _Choice, gpu: Gpu) -> None:
        self._choice = choice
        self._gpu = gpu

    def __call__(self, logits: Tensor, batch: SamplingBatch, blocks: Logits | None = None) -> Sampled:
        implementation, spec = self._choice.pick(logits.shape[0])
        return implementation.run(spec, self._gpu, logits, batch, blocks)  # type: ignore[no-any-return]

    def score(self, logits: Tensor, tokens: Tensor, top_logprobs: int) -> Sampled:
        """Log-probabilities of given tokens."""
        implementation, spec = self._choice.pick(logits.shape[0])
        return implementation.score(spec, self._gpu, logits, tokens, top_logprobs)  # type: ignore[no-any-return]


class Ops:
    """The ops of one model on one device."""

    def __init__(
        self,
        gpu: Gpu,
        activations: Activations,
        wish: Wish,
        precision: Precision = EXACT,
        plan: Plan | None = None,
        threads: int | None = None,
    ) -> None:
        """``threads``: torch's on a CPU, in every step; ``None``: as many as a step has work for."""
        wish.check()
        self.gpu = gpu
        self.activations = activations
        self.wish = wish
        self.precision = precision
        self.plan = Plan() if plan is None else plan
        self.threads = threads

    @property
    def dtype(self) -> torch.dtype:
        """The type in which activations travel."""
        return torch_dtype(self.activations)

    @property
    def kv_dtype(self) -> torch.dtype:
        """The type of the KV cache's pages: E4M3 codes are bytes."""
        return torch.uint8 if self.precision.kv_format == "fp8" else self.dtype

    def uncapturable(self, tokens: int) -> str | None:
        """Why no CUDA graph can hold a step with up to so many tokens; ``None`` where one can."""
        return uncapturable(self.plan, tokens)

    def moe(self, weights: MoeWeights, top_k: int, gate: Gate) -> Moe:
        return self._moe(
            "experts", weights.gate_up, weights.down, (weights.gate_up_bias, weights.down_bias), top_k, gate
        )

    def experts(self, layer: str, gate_up: Weight, down: Weight, top_k: int, gate: Gate) -> Moe:
        """Experts without biases, under a plan's name for them; bf16 ones where the precision has another format."""
        return self._moe(layer, gate_up, down, (None, None), top_k, gate)

    def _moe(
        self,
        layer: str,
        gate_up: Weight,
        down: Weight,
        biases: tuple[Tensor | None, Tensor | None],
        top_k: int,
        gate: Gate,
    ) -> Moe:
        experts, rows, hidden = gate_up.shape
        own, has_bias = format_name(gate_up), biases[0] is not None
        spec = MoeSpec(experts, top_k, hidden, rows // 2, own, self.activations, gate, has_bias, tokens=1)
        choice = self._choose("moe", layer, spec)
        gate_up, down = (convert(w, choice.specs[0].weight_format) for w in (gate_up, down))
        assert isinstance(gate_up, BlockScaled)  # no implementation of moe reads anything else
        assert isinstance(down, BlockScaled)
        return Moe(choice, self.gpu, MoeWeights(gate_up, down, *biases))

    def dense(self, layer: str, weights: DenseWeights, softcap: float | None = None) -> Dense:
        rows, columns = weights.weight.shape
        has_bias = weights.bias is not None
        spec = DenseSpec(rows, columns, weights.format, self.activations, has_bias, tokens=1, softcap=softcap)
        choice = self._choose("dense", layer, spec)
        held = DenseWeights(convert(weights.weight, choice.specs[0].weight_format), weights.bias)
        return Dense(choice, self.gpu, held)

    def embed(self, weight: Weight) -> Embedding:
        """The embedding table in its format. Where a model ties it to lm_head, it passes what lm_head holds."""
        return Embedding(convert(weight, self.precision.format_of("embed", format_name(weight))), self.dtype)

    def attention(self, layer: str, spec: AttentionSpec, sinks: Tensor | None) -> Attention:
        return Attention(self._choose("attention", layer, spec), self.gpu, sinks)

    def small(self, spec: SmallSpec, layer: str = "small") -> SmallOps:
        """Norms, rope, KV write and routing: one implementation for all of them."""
        implementation = self._choose("small", layer, spec).implementations[0]
        assert isinstance(implementation, SmallOps)  # the registry files it under this op
        return implementation.on(self.gpu)

    def sampling(self, vocab: int) -> Sampling:
        return Sampling(self._choose("sampling", "sampling", SamplingSpec(vocab, tokens=1)), self.gpu)

    def _choose(self, op: str, layer: str, spec: Spec) -> _Choice:
        setup = Setup(self.gpu, self.activations, self.wish, self.precision)
        if not self.plan.of(op, layer):
            self.plan.add(decide_use(Use(op, layer, spec), setup))
        decisions = self.plan.of(op, layer)
        specs = tuple(decision.spec for decision in decisions)
        if hasattr(spec, "weight_format"):  # the plan was made for these very weights
            asked = self.precision.applied(layer, spec)
            assert replace(specs[0], tokens=1, activations=self.activations) == asked, (layer, specs[0], asked)
        return _Choice(specs, tuple(registry.find(op, decision.chosen) for decision in decisions))


__all__ = [
    "BUCKETS",
    "MAX_TOP_LOGPROBS",
    "MLP_RUN",
    "PROMPT_BIT",
    "Activations",
    "Attention",
    "AttentionBatch",
    "AttentionSpec",
    "Beside",
    "Bias",
    "Dense",
    "DenseSpec",
    "DenseWeights",
    "Embedding",
    "Gate",
    "GateKind",
    "HeadNorms",
    "History",
    "Kernel",
    "Logits",
    "Moe",
    "MoeSpec",
    "MoeWeights",
    "Ops",
    "PagedKv",
    "RopeTable",
    "Router",
    "Routing",
    "Sampled",
    "Sampling",
    "SamplingBatch",
    "SamplingSpec",
    "Sandwich",
    "SmallOps",
    "SmallSpec",
    "Status",
    "Use",
    "Wish",
    "recording",
]
