"""Number formats: encode, decode, rounding and edge cases, in torch on any device. No GPU knowledge, no layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from microscale.errors import Unsupported
from microscale.formats import fp8, fp8_block, mxfp4, mxfp8, nvfp4
from microscale.formats.blockscale import BLOCK, SCALE_NAN, BlockFormat, BlockScaled, decode_scales, without_memory
from microscale.formats.fp8 import ChannelScaled
from microscale.formats.fp8 import encode as encode_channels
from microscale.formats.fp8_block import FP8_BLOCK
from microscale.formats.mxfp4 import MXFP4
from microscale.formats.mxfp8 import MXFP8
from microscale.formats.nvfp4 import NVFP4
from microscale.formats.shape_only import ShapeOnly

if TYPE_CHECKING:
    from torch import Tensor

FORMATS: dict[str, BlockFormat] = {fmt.name: fmt for fmt in (MXFP4, MXFP8, NVFP4, FP8_BLOCK)}

_ENCODERS = {MXFP4: mxfp4.encode, MXFP8: mxfp8.encode, NVFP4: nvfp4.encode, FP8_BLOCK: fp8_block.encode}
_DECODERS = {MXFP4: mxfp4.decode, MXFP8: mxfp8.decode, NVFP4: nvfp4.decode, FP8_BLOCK: fp8_block.decode}


def block_format(name: str) -> BlockFormat:
    """The format of this name."""
    try:
        return FORMATS[name]
    except KeyError:
        raise Unsupported(f"Unknown block format {name!r}; known are {', '.join(FORMATS)}.") from None


def encode(x: Tensor, fmt: BlockFormat) -> BlockScaled:
    """``x [..., K]`` in ``fmt``, by the rules of the format's own module."""
    return _ENCODERS[fmt](x)


def decode(tensor: BlockScaled | ChannelScaled, dtype: torch.dtype | None = None) -> Tensor:
    """The numbers ``[..., K]`` that a scaled tensor stands for; float32 unless another type is named."""
    dtype = dtype or torch.float32
    if isinstance(tensor, ChannelScaled):
        return fp8.decode(tensor, dtype)
    return _DECODERS[tensor.format](tensor, dtype)


__all__ = [
    "BLOCK",
    "FORMATS",
    "FP8_BLOCK",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "SCALE_NAN",
    "BlockFormat",
    "BlockScaled",
    "ChannelScaled",
    "ShapeOnly",
    "block_format",
    "decode",
    "decode_scales",
    "encode",
    "encode_channels",
    "without_memory",
]
