"""Launches of what a draft head's pass has around its layer: two norms side by side before it, the guess behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from microscale.kernels.launch import launch
from microscale.kernels.small import head_pass_jit
from microscale.kernels.small.norms import launch_small, norm_block, warps

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS = 2048
"""Blocks of logits that a program of ``likeliest`` takes at once, 8 a thread: a vocabulary of 32,000 in one go."""
OPTIONS = {"num_warps": 8}


def norm_pair(table: Tensor, token_ids: Tensor, hidden: Tensor, weights: Tensor, epsilon: float, pdl: bool) -> Tensor:
    """What ``reference.norm_pair`` says, in one launch."""
    tokens, width = hidden.shape
    out = torch.empty((tokens, 2 * width), dtype=hidden.dtype, device=hidden.device)
    if tokens:
        block = norm_block(width)
        strides = token_ids.stride(0), hidden.stride(0)
        arguments = (table, token_ids, hidden, weights, out, epsilon, width, *strides)
        launch_small(head_pass_jit.norm_pair, (tokens, 2), arguments, {"BLOCK": block}, warps(block), pdl)
    return out


def likeliest(block_max: Tensor, block_argmax: Tensor, target_ids: Tensor | None, out: Tensor) -> None:
    """What ``reference.likeliest`` says, in one launch."""
    tokens, blocks = block_max.shape
    if tokens:
        ids = out if target_ids is None else target_ids  # not read where there are none
        arguments = (block_max.contiguous(), block_argmax.contiguous(), ids, out, blocks, out.stride(0))
        constants: dict[str, Any] = {"BLOCK": BLOCKS, "MAPPED": target_ids is not None}
        launch(head_pass_jit.likeliest, (tokens,), arguments, constants, OPTIONS)
