"""FP8 with one float32 scale for each 32 values of a row: E4M3 elements, as in MXFP8, under any scale.

This holds what FP8 checkpoints have, exactly, whatever their scales are for: blocks of 128 x 128 (Qwen's and
DeepSeek's own, ``weight_scale_inv``), rows, or the whole matrix. Blocks of 32 divide every width that a model has.

A block's scale is its largest magnitude over 448; elements round to nearest, ties to even. A block of zeros has scale
1. A block with a NaN or an infinity has scale NaN and elements 0, so that it decodes to NaN throughout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from microscale.formats.blockscale import BlockFormat, BlockScaled, divided, split_blocks
from microscale.formats.fp8 import SMALLEST_SCALE
from microscale.formats.mxfp8 import MXFP8, round_e4m3

if TYPE_CHECKING:
    from torch import Tensor

FP8_BLOCK = BlockFormat("fp8_block", bits=8, max_exponent=8, max_value=448.0, scale_bytes=4)


def encode(x: Tensor) -> BlockScaled:
    """``x [..., K]``, computed in float32."""
    blocks = split_blocks(x, FP8_BLOCK).float()
    finite = torch.isfinite(blocks).all(dim=-1)
    blocks = torch.where(finite[..., None], blocks, 0.0)
    largest = blocks.abs().amax(dim=-1)
    scales = torch.where(largest == 0, 1.0, divided(largest, MXFP8.max_value).clamp(min=SMALLEST_SCALE))
    values = round_e4m3(blocks / scales[..., None]).flatten(-2)
    return BlockScaled(values, torch.where(finite, scales, torch.nan), FP8_BLOCK)


def decode(tensor: BlockScaled, dtype: torch.dtype) -> Tensor:
    """The numbers that the codes stand for: exact in float64, else the rounded product."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    blocks: Tensor = tensor.values.view(torch.float8_e4m3fn).to(wide).unflatten(-1, (-1, FP8_BLOCK.block))
    return (blocks * tensor.scales.to(wide)[..., None]).flatten(-2).to(dtype)
