"""The contract of ``moe``: gather tokens, two grouped GEMMs with bias and a gated activation, weighted combine.

    h = x[t] @ gate_up[e].T + gate_up_bias[e]              for each token t and each of its experts e
    a = gate(h)
    y[t] = sum over e of  weight[t, e] * (a @ down[e].T + down_bias[e])

Routing (which experts, with which weights) is an input.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from microscale.errors import Unsupported
from microscale.formats import BlockScaled
from microscale.kernels.op import Activations as Activations


class GateKind(StrEnum):
    SWIGLU_CLAMPED = "swiglu_clamped"
    """``(up + 1) * g * sigmoid(alpha * g)``, g = gate clamped above at limit, up clamped to ±limit (gpt-oss)."""
    GELU_TANH = "gelu_tanh"
    """``gelu_tanh(gate) * up`` (Gemma)."""
    SILU = "silu"
    """``silu(gate) * up`` (Qwen3)."""


@dataclass(frozen=True)
class Gate:
    """The gated activation between the two GEMMs, and how gate and up rows are arranged in ``gate_up``."""

    kind: GateKind
    interleaved: bool
    """True: gate rows even, up rows odd. False: all gate rows, then all up rows."""
    alpha: float = 1.702
    limit: float = 7.0
    run: int = 1
    """Where they are interleaved, how many gate rows stand together before as many up rows. Experts have 1."""


@dataclass(frozen=True)
class MoeSpec:
    """One expert layer and the number of tokens that it is asked to run."""

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    weight_format: str
    """``mxfp4`` or ``mxfp8``."""
    activations: Activations
    gate: Gate
    bias: bool
    tokens: int


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
    """Which experts each token goes to. An id may stand in a row once; weights are already normalised."""

    expert_ids: Tensor  # [tokens, top_k] int32
    weights: Tensor  # [tokens, top_k] float32

    def __post_init__(self) -> None:
        if self.expert_ids.dtype != torch.int32 or self.weights.dtype != torch.float32:
            raise Unsupported(f"Routing is int32 and float32, not {self.expert_ids.dtype} and {self.weights.dtype}.")
