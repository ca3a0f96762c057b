"""The contract of ``dense``: ``y = x @ weight.T + bias + residual``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from microscale.errors import Unsupported
from microscale.formats import BlockScaled
from microscale.kernels.op import Activations


@dataclass(frozen=True)
class DenseSpec:
    """One dense layer and the number of tokens that it is asked to run."""

    rows: int
    """Outputs per token."""
    columns: int
    """Inputs per token."""
    weight_format: str
    """``bf16``, ``mxfp8`` or ``mxfp4``."""
    activations: Activations
    bias: bool
    tokens: int


@dataclass(frozen=True)
class DenseWeights:
    """A dense layer as the checkpoint has it, or as it was quantised at load."""

    weight: Tensor | BlockScaled  # [rows, columns]
    bias: Tensor | None = None  # [rows]

    def __post_init__(self) -> None:
        if len(self.weight.shape) != 2:
            raise Unsupported(f"A dense weight has two axes, not shape {tuple(self.weight.shape)}.")

    @property
    def format(self) -> str:
        return self.weight.format.name if isinstance(self.weight, BlockScaled) else "bf16"
