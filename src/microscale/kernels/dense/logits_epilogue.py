"""What sampling wants of logits that a library computed or that are yet to be capped: one launch behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from microscale.kernels.dense import logits_epilogue_jit
from microscale.kernels.dense.spec import Logits
from microscale.kernels.launch import launch
from microscale.kernels.numbers import cdiv

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_ROWS = 1024
WARPS = 4


def capped(logits: Logits, softcap: float | None) -> Logits:
    """``logits`` squeezed into ±softcap, in place, with the blocks that they then have.

    A pass of its own: 262,144 logits of one token are 1 MB, where lm_head reads 1,476.
    """
    return logits if softcap is None else summarise(logits.values, softcap)


def summarise(values: Tensor, softcap: float | None = None) -> Logits:
    """Float32 ``values [tokens, rows]``, capped in place if so wished, with their blocks."""
    tokens, rows = values.shape
    blocks = cdiv(rows, BLOCK_ROWS)
    largest, total = (torch.empty((tokens, blocks), dtype=torch.float32, device=values.device) for _ in range(2))
    first = torch.empty((tokens, blocks), dtype=torch.int32, device=values.device)
    if tokens:
        arguments = (values, largest, first, total, rows, softcap or 0.0)
        constants = {"BLOCK": BLOCK_ROWS, "CAPPED": softcap is not None}
        launch(logits_epilogue_jit.summarise, (blocks, tokens), arguments, constants, {"num_warps": WARPS})
    return Logits(values, largest, first, total, BLOCK_ROWS)
