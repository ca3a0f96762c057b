"""What sampling wants of logits that a library computed or that are yet to be capped: one launch behind them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from microscale.kernels.dense import tail_jit
from microscale.kernels.dense.spec import Logits
from microscale.kernels.numbers import cdiv
from microscale.kernels.op import Variant

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
        tail_jit.summarise[(blocks, tokens)](
            values, largest, first, total, rows, softcap or 0.0,
            BLOCK=BLOCK_ROWS, CAPPED=softcap is not None, num_warps=WARPS,
        )  # fmt: skip
    return Logits(values, largest, first, total, BLOCK_ROWS)


def variants(implementation: str, *, only_capped: bool = False) -> Iterator[Variant]:
    """``only_capped``: of an implementation whose own kernels summarise."""
    signature = {"values_ptr": "*fp32", "max_ptr": "*fp32", "argmax_ptr": "*i32", "sum_ptr": "*fp32", "rows": "i32"}
    divisible = tuple(signature)
    signature["softcap"] = "fp32"
    for is_capped in (True,) if only_capped else (False, True):
        constants, options = {"BLOCK": BLOCK_ROWS, "CAPPED": is_capped}, {"num_warps": WARPS}
        name = "summarise capped" if is_capped else "summarise"
        yield Variant("dense", implementation, name, tail_jit.summarise, signature, constants, options, divisible)
