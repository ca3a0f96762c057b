"""The contract of ``moe``: gather tokens, two grouped GEMMs with bias and a gated activation, weighted combine.

    h = x[t] @ gate_up[e].T + gate_up_bias[e]              for each token t and each of its experts e
    a = gate(h)
    y[t] = sum over e of  weight[t, e] * (a @ down[e].T + down_bias[e])

Routing (which experts, with which weights) is an input.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Generic

import torch

from microscale.errors import Unsupported
from microscale.formats import BlockScaled
from microscale.hardware import Gpu
from microscale.kernels.dense.packed import PackedDense
from microscale.kernels.op import Activations as Activations
from microscale.kernels.op import Implementation, PackedT, Path

if TYPE_CHECKING:
    from torch import Tensor


class GateKind(StrEnum):
    SWIGLU_CLAMPED = "swiglu_clamped"
    """``(up + 1) * g * sigmoid(alpha * g)``, g = gate clamped above at limit, up clamped to ±limit (gpt-oss)."""
    GELU_TANH = "gelu_tanh"
    """``gelu_tanh(gate) * up`` (Gemma)."""
    SILU = "silu"
    """``silu(gate) * up`` (Qwen3-MoE)."""


@dataclass(frozen=True)
class Gate:
    """The gated activation between the two GEMMs, and how gate and up rows are arranged in ``gate_up``."""

    kind: GateKind
    interleaved: bool
    """True: gate rows even, up rows odd. False: all gate rows, then all up rows."""
    alpha: float = 1.702
    limit: float = 7.0
    run: int = 1
    """Where they are interleaved, how many gate rows come together before as many up rows. Experts have 1."""


@dataclass(frozen=True)
class MlpSpec:
    """A dense MLP next to the experts, which reads and adds to the same residual stream."""

    units: int
    weight_format: str
    packed: bool
    """Whether both of its matrices are held as ``PackedDense``, which the experts' launches read."""
    bias: bool


@dataclass(frozen=True)
class MoeSpec:
    """One expert layer and the number of tokens that it is asked to run."""

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    weight_format: str
    """``mxfp4``, ``mxfp8``, ``nvfp4`` or ``fp8_block``."""
    activations: Activations
    gate: Gate
    bias: bool
    tokens: int
    mlp: MlpSpec | None = None
    """The dense MLP that is to run in the experts' own launches, if any."""


@dataclass(frozen=True)
class MoeWeights:
    """The experts as the checkpoint has them."""

    gate_up: BlockScaled  # [experts, 2 * intermediate, hidden]
    down: BlockScaled  # [experts, hidden, intermediate]
    gate_up_bias: Tensor | None = None  # [experts, 2 * intermediate]
    down_bias: Tensor | None = None  # [experts, hidden]

    def __post_init__(self) -> None:
        experts, rows, hidden = self.gate_up.shape
        if self.down.shape != (experts, hidden, rows // 2) or rows % 2:
            raise Unsupported(f"gate_up {self.gate_up.shape} and down {self.down.shape} are not one expert layer.")
        if (self.gate_up_bias is None) != (self.down_bias is None):
            raise Unsupported("An expert layer has either both biases or none.")


@dataclass(frozen=True)
class Routing:
    """Which experts each token goes to. An id is in a row at most once; weights are already normalised."""

    expert_ids: Tensor  # [tokens, top_k] int32
    weights: Tensor  # [tokens, top_k] float32

    def __post_init__(self) -> None:
        if self.expert_ids.dtype != torch.int32 or self.weights.dtype != torch.float32:
            raise Unsupported(f"Routing is int32 and float32, not {self.expert_ids.dtype} and {self.weights.dtype}.")


@dataclass(frozen=True)
class Parts:
    """A layer's answer whose experts are not added up yet. Whoever reads it adds a token's parts up in float32, from
    0.0 on and in their order, and rounds the sum to the activations' type."""

    rows: Tensor  # [tokens * top_k, hidden] float32, contiguous, with the experts' weights applied
    top_k: int

    def summed(self, dtype: torch.dtype) -> Tensor:
        """What the layer would have answered, ``[tokens, hidden]``, op by op: what kernels are held against."""
        total = self.rows.new_zeros((self.rows.shape[0] // self.top_k, self.rows.shape[1]))
        for part in self.rows.unflatten(0, (-1, self.top_k)).unbind(1):
            total = total + part
        return total.to(dtype)


@dataclass(frozen=True)
class MoePath(Path[MoeSpec], Generic[PackedT]):
    """One way to run an expert layer."""

    start: Callable[[PackedT, MoeSpec, Gpu, Tensor, Routing], Tensor]


@dataclass(frozen=True)
class PartsPath(Path[MoeSpec], Generic[PackedT]):
    """One way to run an expert layer up to the sum of a token's experts, which is left to the reader."""

    start: Callable[[PackedT, MoeSpec, Gpu, Tensor, Routing], Parts]


@dataclass(frozen=True)
class Mlp:
    """The matrices of a dense MLP, packed. Rows of ``gate_up`` come in runs of ``with_mlp.RUN``."""

    gate_up: PackedDense
    down: PackedDense


@dataclass(frozen=True)
class MlpPath(Path[MoeSpec], Generic[PackedT]):
    """One way to run an expert layer with a dense MLP in the same launches."""

    start: Callable[[PackedT, Mlp, MoeSpec, Gpu, Tensor, Routing], Tensor]


class MoeOp(Implementation[MoeSpec], Generic[PackedT]):
    """What every implementation of ``moe`` has."""

    op = "moe"
    paths: tuple[MoePath[PackedT], ...]
    parts_paths: tuple[PartsPath[PackedT], ...] = ()
    """The ways of ``run_parts``; none where there is no such form."""
    mlp_paths: tuple[MlpPath[PackedT], ...] = ()
    """The ways of ``run_with_mlp``; none where there is no such form."""

    @abstractmethod
    def pack(self, weights: MoeWeights, spec: MoeSpec) -> PackedT:
        """The experts in this implementation's layout, on the device where they are."""

    def check(self, x: Tensor) -> None:
        """Refuses tokens that ``run`` would misread."""

    def run(
        self, packed: PackedT, spec: MoeSpec, gpu: Gpu, x: Tensor, routing: Routing, path: MoePath[PackedT]
    ) -> Tensor:
        """``x [tokens, hidden]`` → the same shape and type, by ``path``."""
        self.check(x)
        return path.start(packed, spec, gpu, x, routing)

    def run_parts(
        self, packed: PackedT, spec: MoeSpec, gpu: Gpu, x: Tensor, routing: Routing, path: PartsPath[PackedT]
    ) -> Parts:
        """As ``run``, without the sum over a token's experts, by ``path``."""
        self.check(x)
        return path.start(packed, spec, gpu, x, routing)

    def run_with_mlp(
        self, packed: PackedT, mlp: Mlp, spec: MoeSpec, gpu: Gpu, x: Tensor, routing: Routing, path: MlpPath[PackedT]
    ) -> Tensor:
        """A dense MLP of the experts' gate with them, by ``path``: ``x [2, tokens, hidden]``, for the MLP and for the
        experts → both answers."""
        return path.start(packed, mlp, spec, gpu, x, routing)
