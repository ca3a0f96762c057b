"""What models call. A model asks for an op with its weights and gets back something to call with tokens.

``Ops`` is made once per model with the GPU, the activations' type, the user's preference and precision. Binding a layer
takes its decision from ``plan`` (or makes it there), brings the weights into the format of the precision, packs them
for the implementation, and calling it runs just that. Weights change format layer by layer, on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from microscale.errors import Unsupported
from microscale.formats import BlockScaled
from microscale.hardware import Gpu
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, PagedKv
from microscale.kernels.dense.reference import BLOCK_ROWS as LOGITS_BLOCK
from microscale.kernels.dense.spec import DenseSpec, DenseWeights, Logits
from microscale.kernels.launch import Kernel, Launch, recording
from microscale.kernels.moe.spec import Gate, GateKind, MoeSpec, MoeWeights, Parts, Routing
from microscale.kernels.moe.with_mlp import RUN as MLP_RUN
from microscale.kernels.op import Activations, torch_dtype
from microscale.kernels.recurrent.spec import RecurrentSpec, RecurrentWeights, StateBatch, StateCache
from microscale.kernels.sampling.spec import (
    PROMPT_BIT,
    Bias,
    History,
    Sampled,
    SampleStatus,
    SamplingBatch,
    SamplingSpec,
)
from microscale.kernels.small.spec import HeadNorms, NormAddNorm, RopeTable, Router, SmallSpec
from microscale.planning import registry
from microscale.planning.bound import (
    Attention,
    AttentionKind,
    Dense,
    DenseKind,
    Embedding,
    Moe,
    MoeKind,
    Recurrent,
    RecurrentKind,
    Sampling,
    Small,
    SmallKind,
)
from microscale.planning.choose_kernel import Preference
from microscale.planning.decision import Plan
from microscale.planning.path_cache import LayerChoice, OpT, SpecT
from microscale.planning.plan import BUCKETS, Setup, Use, decide_use, uncapturable
from microscale.planning.precision import EXACT, Precision
from microscale.planning.quantise import Weight, convert, format_name
from microscale.planning.ranks import ALONE, RankSums

if TYPE_CHECKING:
    from torch import Tensor


Computed = TypeVar("Computed")


def dense_spec(
    weights: DenseWeights, activations: Activations, softcap: float | None = None, behind_sum: bool = False
) -> DenseSpec:
    """The spec of one token, with the weights as they are in the checkpoint."""
    rows, columns = weights.weight.shape
    bias = weights.bias is not None
    return DenseSpec(rows, columns, weights.format, activations, bias, 1, softcap, behind_sum)


def moe_spec(gate_up: Weight, activations: Activations, top_k: int, gate: Gate, *, bias: bool) -> MoeSpec:
    """The same of experts: ``gate_up [experts, twice the width after the gate, hidden]``."""
    experts, rows, hidden = gate_up.shape
    return MoeSpec(experts, top_k, hidden, rows // 2, format_name(gate_up), activations, gate, bias, tokens=1)


class SideStream:
    """Runs two independent pieces of work at once: on a GPU two streams, in a CUDA graph two branches that join."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(
        self, first: Callable[[], Tensor], second: Callable[[], Tensor], *, at_once: bool
    ) -> tuple[Tensor, Tensor]:
        """Both results, which later work on the current stream may read.

        Memory is safe. The caller holds what ``first`` reads until the streams have joined. Its result belongs to the
        side stream, whose next turn begins only after everything that the current stream was given by then, readers of
        this result included.
        """
        if self._side is None or not at_once:
            return first(), second()
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            one = first()
        other = second()
        main.wait_stream(self._side)
        return one, other


class Ops:
    """The ops of one model on one device."""

    def __init__(
        self,
        gpu: Gpu,
        activations: Activations,
        preference: Preference,
        precision: Precision = EXACT,
        plan: Plan | None = None,
        threads: int | None = None,
        ranks: RankSums = ALONE,
    ) -> None:
        """``threads``: torch's on a CPU, in every step; ``None``: as many as a step has work for. ``ranks``: who holds
        the other parts of the model."""
        preference.check()
        self.gpu = gpu
        self.activations = activations
        self.preference = preference
        self.precision = precision
        self.plan = Plan() if plan is None else plan
        self.threads = threads
        self.ranks = ranks
        self._moe_kinds: dict[str, MoeKind] = {}
        self._dense_kinds: dict[str, DenseKind] = {}
        self._attention_kinds: dict[str, AttentionKind] = {}
        self._recurrent_kinds: dict[str, RecurrentKind] = {}
        self._small_kinds: dict[str, SmallKind] = {}

    @property
    def dtype(self) -> torch.dtype:
        """The type in which activations travel."""
        return torch_dtype(self.activations)

    @property
    def kv_dtype(self) -> torch.dtype:
        """The type of the KV cache's pages: E4M3 codes are bytes."""
        return torch.uint8 if self.precision.kv_format == "fp8" else self.dtype

    def computed(self, make: Callable[[], Computed]) -> Computed:
        """What a model computes once from its weights and its config, as it is built."""
        return make()

    def uncapturable(self, tokens: int) -> str | None:
        """Why no CUDA graph can hold a step with up to this many tokens; ``None`` where one can."""
        return uncapturable(self.plan, tokens) or self.ranks.uncapturable

    def moe(self, weights: MoeWeights, top_k: int, gate: Gate) -> Moe:
        biases = weights.gate_up_bias, weights.down_bias
        return self.experts("experts", weights.gate_up, weights.down, top_k, gate, biases)

    def experts(
        self,
        layer: str,
        gate_up: Weight,
        down: Weight,
        top_k: int,
        gate: Gate,
        biases: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Moe:
        """Experts under a plan's name for them; bf16 ones where the precision has another format."""
        spec = moe_spec(gate_up, self.activations, top_k, gate, bias=biases[0] is not None)
        choice = self._choose("moe", layer, spec, registry.moe)
        kind = self._moe_kinds.setdefault(layer, MoeKind(choice))
        gate_up, down = (convert(w, choice.specs[0].weight_format) for w in (gate_up, down))
        assert isinstance(gate_up, BlockScaled)  # no implementation of moe reads anything else
        assert isinstance(down, BlockScaled)
        return Moe(kind, MoeWeights(gate_up, down, *biases))

    def dense(
        self, layer: str, weights: DenseWeights, softcap: float | None = None, *, behind_sum: bool = False
    ) -> Dense:
        """``behind_sum``: the layer reads the norm of what is added to the residual stream (``Dense.from_sum``)."""
        spec = dense_spec(weights, self.activations, softcap, behind_sum)
        choice = self._choose("dense", layer, spec, registry.dense)
        kind = self._dense_kinds.setdefault(layer, DenseKind(choice))
        held = DenseWeights(convert(weights.weight, choice.specs[0].weight_format), weights.bias)
        return Dense(kind, held)

    def embed(self, weight: Weight) -> Embedding:
        """The embedding table in its format. Where a model ties it to lm_head, it passes what lm_head holds."""
        return Embedding(convert(weight, self.precision.format_of("embed", format_name(weight))), self.dtype)

    def attention(self, layer: str, spec: AttentionSpec, sinks: Tensor | None) -> Attention:
        choice = self._choose("attention", layer, spec, registry.attention)
        return Attention(self._attention_kinds.setdefault(layer, AttentionKind(choice)), sinks)

    def recurrent(self, layer: str, spec: RecurrentSpec, weights: RecurrentWeights) -> Recurrent:
        choice = self._choose("recurrent", layer, spec, registry.recurrent)
        return Recurrent(self._recurrent_kinds.setdefault(layer, RecurrentKind(choice)), weights)

    def small(self, spec: SmallSpec, layer: str = "small") -> Small:
        """Norms, rope, KV write and routing: one implementation for all of them."""
        choice = self._choose("small", layer, spec, registry.small)
        return Small(self._small_kinds.setdefault(layer, SmallKind(choice)))

    def sampling(self, vocab: int) -> Sampling:
        return Sampling(self._choose("sampling", "sampling", SamplingSpec(vocab, tokens=1), registry.sampling))

    def _choose(self, op: str, layer: str, spec: SpecT, find: Callable[[str], OpT]) -> LayerChoice[OpT, SpecT]:
        setup = Setup(self.gpu, self.activations, self.preference, self.precision)
        if not self.plan.of(op, layer):
            self.plan.add(decide_use(Use(op, layer, spec), setup))
        decisions = self.plan.of(op, layer)
        self._check_spec(layer, decisions[0].spec, self.precision.applied(layer, spec))
        specs = tuple(decision.spec for decision in decisions)
        return LayerChoice(specs, tuple(find(decision.chosen) for decision in decisions), self.gpu)

    def _check_spec(self, layer: str, planned: Any, asked: Any) -> None:
        """Refuse a plan that was made for another layer than the model binds. Only the plan decides how many tokens
        run, how much context is assumed and what the activations become inside."""
        decided = {"tokens", "context", "activations"}
        names = [field.name for field in fields(asked) if field.name not in decided]
        wrong = [
            f"{name} is {getattr(asked, name)} and the plan has {getattr(planned, name)}"
            for name in names
            if getattr(asked, name) != getattr(planned, name)
        ]
        if type(planned) is not type(asked) or wrong:
            reason = "; ".join(wrong) or f"the spec is a {type(asked).__name__}"
            raise Unsupported(
                f"The plan was made for another model: of {layer}, {reason}. Make it from this one's config."
            )


__all__ = [
    "BUCKETS",
    "LOGITS_BLOCK",
    "MLP_RUN",
    "PROMPT_BIT",
    "Activations",
    "Attention",
    "AttentionBatch",
    "AttentionSpec",
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
    "Launch",
    "Logits",
    "Moe",
    "MoeSpec",
    "MoeWeights",
    "NormAddNorm",
    "Ops",
    "PagedKv",
    "Parts",
    "Preference",
    "RankSums",
    "Recurrent",
    "RecurrentSpec",
    "RecurrentWeights",
    "RopeTable",
    "Router",
    "Routing",
    "SampleStatus",
    "Sampled",
    "Sampling",
    "SamplingBatch",
    "SamplingSpec",
    "SideStream",
    "Small",
    "SmallSpec",
    "StateBatch",
    "StateCache",
    "Use",
    "recording",
]
