"""torch's matrix product as implementations call it: cuBLAS on a GPU, and on a CPU the same numbers on every CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` with float32 sums, in the type of ``x``.

    On a CPU bf16 is multiplied in float32 and rounded once. Not every CPU has bf16 units (Arm cores without them print
    a stack trace from ``mkldnn_matmul`` and take another path), and those that have round in places of their own.
    """
    if x.is_meta:  # a shape alone, for whose product torch would import sympy
        return x.new_empty((*x.shape[:-1], weight.shape[0]))
    if x.dtype is not torch.bfloat16 or not x.is_cpu:
        return torch.nn.functional.linear(x, weight, bias)
    return torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
