"""The contract of the small ops: how much of them a model runs, and what an implementation of them offers."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from microscale.kernels.attention.spec import PagedKv
from microscale.kernels.moe.spec import Routing
from microscale.kernels.op import Activations, Implementation


@dataclass(frozen=True)
class SmallSpec:
    """The sizes that the small ops of one model work on."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    activations: Activations
    tokens: int


@dataclass(frozen=True)
class RopeTable:
    """Rotary frequencies, one per pair of dimensions, and the factor on cosine and sine (YaRN; 1 without)."""

    inverse_frequencies: Tensor  # [head_dim / 2] float32
    scale: float


class SmallOps(Implementation[SmallSpec]):
    """All small ops of a model, from one implementation. What each computes is in ``reference.py``."""

    op = "small"
    layout = "checkpoint"

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """``x [tokens, hidden]`` normalised, in its own type."""

    @abstractmethod
    def rope_and_write_kv(
        self, qkv: Tensor, num_heads: int, positions: Tensor, table: RopeTable, kv: PagedKv, slots: Tensor
    ) -> Tensor:
        """From ``qkv [tokens, heads + 2 * kv_heads, head_dim]`` rotated q; rotated k and v go to their slots."""

    @abstractmethod
    def route(self, logits: Tensor, top_k: int) -> Routing:
        """The experts of each token and their weights from ``logits [tokens, experts]``."""
