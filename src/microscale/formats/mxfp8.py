"""MXFP8: E4M3 elements, one to a byte (the variant without infinities; 0x7F and 0xFF are NaN)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from microscale.formats.blockscale import BlockFormat, BlockScaled, apply_scales, shared_scales, split_blocks

if TYPE_CHECKING:
    from torch import Tensor

MXFP8 = BlockFormat("mxfp8", bits=8, max_exponent=8, max_value=448.0)


def round_e4m3(x: Tensor) -> Tensor:
    """The nearest E4M3 codes, ties to even, saturating at 448."""
    return x.clamp(-MXFP8.max_value, MXFP8.max_value).to(torch.float8_e4m3fn).view(torch.uint8)


def encode(x: Tensor) -> BlockScaled:
    """``x [..., K]`` in MXFP8; see ``blockscale`` for zeros, NaN and infinities."""
    scales, scaled = shared_scales(split_blocks(x, MXFP8), MXFP8)
    return BlockScaled(round_e4m3(scaled).flatten(-2), scales, MXFP8)


def decode(tensor: BlockScaled, dtype: torch.dtype) -> Tensor:
    """The numbers that the codes stand for."""
    return apply_scales(tensor.values.view(torch.float8_e4m3fn), tensor.scales, dtype)
