"""The contract of the small ops: what each takes and gives is in ``reference.py``; this says how much of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from microscale.kernels.op import Activations


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
