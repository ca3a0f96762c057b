"""The contract of the small ops: how much of them a model runs, and what an implementation of them offers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from microscale.formats import BlockScaled
from microscale.hardware import Gpu
from microscale.kernels.attention.spec import PagedKv
from microscale.kernels.moe.spec import Gate, Parts, Routing
from microscale.kernels.op import Activations, Implementation, Path

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RouterShape:
    """What a router has, and how many norms the sum before it gets apart from the router's own (``NormAddNorm``)."""

    bias: bool
    expert_scale: bool
    readers: int = 0
    always: bool = False


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
    router: RouterShape | None = None
    """Where experts are routed to; ``None`` where no router is known: any that there are kernels for."""


@dataclass(frozen=True)
class RopeTable:
    """Rotary frequencies, one per pair of dimensions, and the factor on cosine and sine (YaRN; 1 without).

    Dimension i pairs with i + head_dim / 2, also where only a part of a head turns (Gemma 4's full layers: a quarter):
    the frequencies of the other pairs are 0.
    """

    inverse_frequencies: Tensor  # [head_dim / 2] float32
    scale: float


@dataclass(frozen=True)
class HeadNorms:
    """Norms of each head before the rotation: queries and keys with weights, values without one or not at all."""

    q_weight: Tensor  # [head_dim]
    k_weight: Tensor  # [head_dim]
    epsilon: float
    values: bool = True
    """Whether values are normed (Gemma 4) or stay as they are (Qwen3)."""


@dataclass(frozen=True)
class Router:
    """The matrix that scores the experts."""

    weight: Tensor  # [experts, hidden]
    bias: Tensor | None = None  # [experts]
    expert_scale: Tensor | None = None  # [experts] float32: factor on the weights of what was chosen (Gemma 4)
    always: bool = False
    """The last expert always runs, in addition to those chosen, with a sigmoid as its weight (Qwen3.6)."""

    def shape(self, readers: int = 0) -> RouterShape:
        return RouterShape(self.bias is not None, self.expert_scale is not None, readers, self.always)


@dataclass(frozen=True)
class NormAddNorm:
    """Norms before and after an addition to the residual stream (Gemma 4)."""

    before: Tensor  # [hidden]: weight of the norm of what is added
    after: Tensor  # [n, hidden]: weights of the norms of the sum, one for each reader
    epsilon: float
    scale: float = 1.0
    """Factor on the sum (Gemma's ``layer_scalar``)."""
    before_other: Tensor | None = None  # [hidden], where two parts are joined: that of the second
    joined: Tensor | None = None  # [hidden], likewise: that of their sum


Routed: TypeAlias = "tuple[Tensor, Tensor, Routing]"
"""Norm or norms, sum, and experts."""


@dataclass(frozen=True)
class RoutePath(Path[SmallSpec]):
    """One way from a sum to its norm and to the experts."""

    start: Callable[[Tensor, Tensor, Tensor, float, Router, int, bool], Routed]


@dataclass(frozen=True)
class NormAddNormRoutePath(Path[SmallSpec]):
    """The same between the norms of a around."""

    start: Callable[[Tensor, Tensor, NormAddNorm, Router, int, bool], Routed]


class SmallOps(Implementation[SmallSpec]):
    """All small ops of a model, from one implementation. What each computes is in ``reference.py``."""

    op = "small"
    layout = "checkpoint"
    route_paths: tuple[RoutePath, ...]
    """The ways of ``add_norm_route``."""
    norm_add_norm_route_paths: tuple[NormAddNormRoutePath, ...]
    """The ways of ``norm_add_norm_route``."""
    pdl: bool = False
    """Whether kernels wait by themselves for the one before (programmatic dependent launch)."""

    def on(self, gpu: Gpu) -> SmallOps:
        """The same ops for this GPU, where they differ from GPU to GPU."""
        return self

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        """``x [tokens, hidden]`` normalised, in its own type."""

    @abstractmethod
    def add_rms_norm(
        self, x: Tensor | Parts, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """``x + residual`` normalised, and the sum. The parts of an expert layer are added up first."""

    @abstractmethod
    def add_rms_norm_mxfp8(
        self, x: Tensor | Parts, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[BlockScaled, Tensor]:
        """As ``add_rms_norm``, with the norm in MXFP8."""

    @abstractmethod
    def norm_add_norm(
        self, x: Tensor, other: Tensor | None, residual: Tensor, around: NormAddNorm
    ) -> tuple[Tensor, Tensor]:
        """What is added is normed first, and the sum for each of its readers: norms ``[n, tokens, hidden]``, sum."""

    def norm_add_norm_route(
        self, x: Tensor, residual: Tensor, around: NormAddNorm, router: Router, top_k: int, path: NormAddNormRoutePath
    ) -> Routed:
        """As ``norm_add_norm`` of one part, whose last reader is the router, by ``path``: norms of the others, sum, and
        experts."""
        return path.start(x, residual, around, router, top_k, self.pdl)

    def add_norm_route(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, router: Router, top_k: int, path: RoutePath
    ) -> Routed:
        """``x + residual`` normalised, the sum, and the experts that the router chooses for the norm, by ``path``."""
        return path.start(x, residual, weight, epsilon, router, top_k, self.pdl)

    @abstractmethod
    def rope_and_write_kv(
        self,
        qkv: Tensor,
        num_heads: int,
        positions: Tensor,
        table: RopeTable,
        kv: PagedKv,
        slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """From ``qkv [tokens, heads + 2 * kv_heads, head_dim]`` rotated q; rotated k and v go to their slots.

        With ``heads + kv_heads`` only, K = V: the value is the key before its weight and its rotation.
        """

    @abstractmethod
    def norm_pair(self, table: Tensor, token_ids: Tensor, hidden: Tensor, weights: Tensor, epsilon: float) -> Tensor:
        """Norms of the rows of ``table [vocabulary, hidden]`` for ``token_ids [tokens]`` and of ``hidden [tokens,
        hidden]``, with ``weights [2, hidden]``, side by side: ``[tokens, 2 * hidden]``, what an EAGLE3 head's layer
        reads."""

    @abstractmethod
    def likeliest(self, block_max: Tensor, block_argmax: Tensor, target_ids: Tensor | None, out: Tensor) -> None:
        """Into ``out [tokens]`` int64: the row of the largest logit by what ``Logits`` knows of its blocks, the lowest
        of equals; or what ``target_ids [rows]`` int64 has in its place."""

    @abstractmethod
    def route(self, logits: Tensor, top_k: int, expert_scale: Tensor | None = None, *, always: bool = False) -> Routing:
        """The experts of each token and their weights from ``logits [tokens, experts]``. ``always``: see ``Router``."""

    @abstractmethod
    def gate_heads(self, attended: Tensor, gates: Tensor) -> Tensor:
        """``attended [tokens, heads, head_dim]`` times the sigmoid of ``gates``, which may be a part of wider rows:
        ``[tokens, heads * head_dim]``."""

    @abstractmethod
    def gated(self, gate_up: Tensor, gate: Gate) -> Tensor:
        """The activation of a dense MLP: ``[tokens, 2 * units]`` → ``[tokens, units]``."""
