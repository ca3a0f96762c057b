"""The contract of ``dense``: ``y = x @ weight.T + bias + residual``, and for an lm_head what sampling wants of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

import torch

from microscale.errors import Unsupported
from microscale.formats import BlockScaled, ChannelScaled
from microscale.hardware import Gpu
from microscale.kernels.op import Activations, Implementation, PackedT, Path

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = ("bf16", "fp8", "mxfp8", "mxfp4", "nvfp4", "fp8_block")
"""What ``DenseSpec.weight_format`` may be."""


@dataclass(frozen=True)
class DenseSpec:
    """One dense layer and the number of tokens that it is asked to run."""

    rows: int
    """Outputs per token."""
    columns: int
    """Inputs per token."""
    weight_format: str
    """``bf16``, ``fp8`` (E4M3, one scale a row), ``mxfp8``, ``mxfp4``, ``nvfp4`` or ``fp8_block``."""
    activations: Activations
    bias: bool
    tokens: int
    softcap: float | None = None
    """Of an lm_head: logits become ``softcap * tanh(logits / softcap)`` (Gemma)."""
    behind_sum: bool = False
    """It reads the norm of what was just added to the residual stream, and may be asked for all of it (``Summed``)."""


@dataclass(frozen=True)
class DenseWeights:
    """A dense layer as the checkpoint has it, or as it was quantised at load."""

    weight: Tensor | ChannelScaled | BlockScaled  # [rows, columns]
    bias: Tensor | None = None  # [rows]

    def __post_init__(self) -> None:
        if len(self.weight.shape) != 2:
            raise Unsupported(f"A dense weight has two axes, not shape {tuple(self.weight.shape)}.")

    @property
    def format(self) -> str:
        if isinstance(self.weight, BlockScaled):
            return self.weight.format.name
        return "fp8" if isinstance(self.weight, ChannelScaled) else "bf16"


@dataclass(frozen=True)
class Summed:
    """What a layer behind the residual stream reads: ``x + residual``, its RMSNorm times ``weight``."""

    x: Tensor  # [tokens, columns]
    residual: Tensor  # [tokens, columns]
    weight: Tensor  # [columns]
    epsilon: float


@dataclass(frozen=True)
class Logits:
    """An lm_head's answer, with what the epilogue knows of each block of ``block_rows`` consecutive rows.

    Greedy choice, its log-probability and top-k need no further pass over ``values``: a block whose maximum is not
    among the k largest maxima holds none of the k largest values.
    """

    values: Tensor  # float32 [tokens, rows]
    block_max: Tensor  # float32 [tokens, blocks]; NaN where the block holds a NaN
    block_argmax: Tensor  # int32 [tokens, blocks]: the lowest row with that value, or the lowest NaN
    block_sum: Tensor  # float32 [tokens, blocks]: sum of exp(value - block_max)
    block_rows: int
    """Rows of a block; the last one may have fewer."""


def check_rows(name: str, x: Tensor, residual: Tensor | None = None) -> None:
    """Refuses what the kernels would misread: they take rows of bfloat16 whose columns lie side by side."""
    for tensor in (x, residual):
        if tensor is not None and (tensor.dtype != torch.bfloat16 or tensor.stride(1) != 1):
            raise Unsupported(f"{name} reads rows of bfloat16, not {tensor.dtype} with strides {tensor.stride()}.")


@dataclass(frozen=True)
class DensePath(Path[DenseSpec], Generic[PackedT]):
    """One way to run a dense layer."""

    start: Callable[[PackedT, DenseSpec, Gpu, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class LogitsPath(Path[DenseSpec], Generic[PackedT]):
    """One way to run a dense layer as an lm_head."""

    start: Callable[[PackedT, DenseSpec, Gpu, Tensor], Logits]


@dataclass(frozen=True)
class SumPath(Path[DenseSpec], Generic[PackedT]):
    """One way to run a dense layer behind the residual stream, from the sum on."""

    start: Callable[[PackedT, DenseSpec, Gpu, Summed], tuple[Tensor, Tensor]]


class DenseOp(Implementation[DenseSpec], Generic[PackedT]):
    """What every implementation of ``dense`` has."""

    op = "dense"
    paths: tuple[DensePath[PackedT], ...]
    logits_paths: tuple[LogitsPath[PackedT], ...]
    """The ways of ``run_logits``, first to last."""
    sum_paths: tuple[SumPath[PackedT], ...] = ()
    """The ways of ``run_from_sum``, first to last; none where sum and norm are always ops of their own."""

    @abstractmethod
    def pack(self, weights: DenseWeights, spec: DenseSpec) -> PackedT:
        """The weights in this implementation's layout, on the device where they are."""

    def check(self, x: Tensor, residual: Tensor | None = None) -> None:
        """Refuses tokens that ``run`` would misread."""

    def run(
        self, packed: PackedT, spec: DenseSpec, gpu: Gpu, x: Tensor, residual: Tensor | None, path: DensePath[PackedT]
    ) -> Tensor:
        """``x [tokens, columns]`` → ``[tokens, rows]`` in ``x``'s type, by ``path``."""
        self.check(x, residual)
        return path.start(packed, spec, gpu, x, residual)

    def run_logits(self, packed: PackedT, spec: DenseSpec, gpu: Gpu, x: Tensor, path: LogitsPath[PackedT]) -> Logits:
        """``x [tokens, columns]`` → float32 logits over the rows, and their blocks, by ``path``."""
        self.check(x)
        return path.start(packed, spec, gpu, x)

    def run_from_sum(
        self, packed: PackedT, spec: DenseSpec, gpu: Gpu, summed: Summed, path: SumPath[PackedT]
    ) -> tuple[Tensor, Tensor]:
        """The layer of the norm, ``[tokens, rows]``, and the sum, ``[tokens, columns]``, by ``path``."""
        self.check(summed.x, summed.residual)
        return path.start(packed, spec, gpu, summed)
