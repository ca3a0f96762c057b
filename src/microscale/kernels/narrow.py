"""Activations as they meet the weights: what references compute with, and kernels are held against."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from microscale.formats import MXFP8, decode, encode
from microscale.formats.nvfp4 import encode_rows
from microscale.kernels.op import Activations

if TYPE_CHECKING:
    from torch import Tensor

Rounding = Callable[["Tensor"], "Tensor"]
"""``x [rows, k]`` → float32."""


def rounding(activations: Activations) -> Rounding:
    """What a GEMM with these activations does to its input."""
    return {Activations.MXFP8: mxfp8, Activations.NVFP4: nvfp4}.get(activations, widened)


def widened(x: Tensor) -> Tensor:
    return x.float()


def mxfp8(x: Tensor) -> Tensor:
    return decode(encode(x, MXFP8))


def nvfp4(x: Tensor) -> Tensor:
    """From bf16, each row under a scale of its own: a token is rounded alike whatever it is batched with."""
    return decode(encode_rows(x.bfloat16()))
