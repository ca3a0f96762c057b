"""What sampling wants of logits that a library computed: one launch of ours behind its product."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from microscale.kernels.dense import tail_jit
from microscale.kernels.dense.spec import Logits
from microscale.kernels.op import Variant

BLOCK_ROWS = 1024
WARPS = 4


def summarise(values: Tensor) -> Logits:
    """Float32 ``values [tokens, rows]`` with their blocks."""
    tokens, rows = values.shape
    blocks = triton.cdiv(rows, BLOCK_ROWS)
    largest, total = (torch.empty((tokens, blocks), dtype=torch.float32, device=values.device) for _ in range(2))
    first = torch.empty((tokens, blocks), dtype=torch.int32, device=values.device)
    if tokens:
        tail_jit.summarise[(blocks, tokens)](values, largest, first, total, rows, BLOCK=BLOCK_ROWS, num_warps=WARPS)
    return Logits(values, largest, first, total, BLOCK_ROWS)


def variants(implementation: str) -> Iterator[Variant]:
    signature = {"values_ptr": "*fp32", "max_ptr": "*fp32", "argmax_ptr": "*i32", "sum_ptr": "*fp32", "rows": "i32"}
    constants, options = {"BLOCK": BLOCK_ROWS}, {"num_warps": WARPS}
    divisible = tuple(signature)
    yield Variant("dense", implementation, "summarise", tail_jit.summarise, signature, constants, options, divisible)
