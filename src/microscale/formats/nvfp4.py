"""NVFP4: E2M1 elements, two to a byte, in blocks of 16 with an E4M3 scale each, under one float32 scale.

A value is ``e2m1 * e4m3 * global``. The first product needs six significant bits, so it is exact in bf16 and in f16;
only the float32 scale rounds, once. A checkpoint has one such scale for each matrix, an expert's included. Two
conventions are published: nvidia-modelopt stores the number to multiply by (``weight_scale_2``), compressed-tensors
the number to divide by (``weight_global_scale``). Here it is always multiplied, and every row has its matrix's number.

Encoding is nvidia-modelopt's rule: the global scale is the matrix's largest magnitude over 6 * 448; a block's is its
largest magnitude over 6 times the global one, in E4M3, to nearest even, from 2**-9 to 448; elements are divided by
both and rounded to nearest, ties to even. Where that leaves a choice:

* a block of zeros gets scale 1 and keeps the sign of each zero; a matrix of zeros gets global scale 1;
* a block that contains a NaN or an infinity gets scale byte 0x7F, E4M3's NaN, and elements 0: it decodes to NaN
  throughout, and the other blocks are encoded as if it were zeros;
* a global scale is never below float32's smallest normal number, since devices that flush subnormals would read zero.

The scale's sign bit is not used by any writer; a scale byte with that bit set is decoded as the negative number it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from microscale.formats.blockscale import BlockFormat, BlockScaled, divided, split_blocks
from microscale.formats.fp8 import SMALLEST_SCALE
from microscale.formats.mxfp4 import decode_codes, pack_nibbles, round_e2m1
from microscale.formats.mxfp8 import MXFP8, round_e4m3

if TYPE_CHECKING:
    from torch import Tensor

NVFP4 = BlockFormat("nvfp4", bits=4, max_exponent=2, max_value=6.0, block=16, has_row_scales=True)

SMALLEST_BLOCK_SCALE = 2.0**-9
SCALE_NAN = 0x7F
LARGEST = NVFP4.max_value * MXFP8.max_value
"""What a global scale is multiplied by at most: 2688."""


def row_peaks(x: Tensor) -> Tensor:
    """The largest magnitude in each row, in float32, of the blocks without NaN and infinity."""
    return _finite_blocks(x)[0].abs().amax(dim=(-2, -1))


def global_scales(peaks: Tensor) -> Tensor:
    """Each row's float32 scale from ``peaks [..., rows]``: a matrix's rows have one. A single peak is a matrix."""
    peak = peaks.amax(dim=-1, keepdim=True) if peaks.dim() else peaks
    scales = torch.where(peak == 0, 1.0, divided(peak, LARGEST).clamp(min=SMALLEST_SCALE))
    return scales.expand(peaks.shape).contiguous()


def encode(x: Tensor, row_scales: Tensor | None = None) -> BlockScaled:
    """``x [..., rows, K]`` in NVFP4, computed in float32. ``row_scales [..., rows]``, where they are given, are used
    instead of those of each matrix ``[rows, K]``."""
    blocks, finite = _finite_blocks(x)
    largest = blocks.abs().amax(dim=-1)
    row_scales = global_scales(row_peaks(x)) if row_scales is None else row_scales
    rows = row_scales[..., None]
    wanted = torch.where(largest == 0, 1.0, largest / (NVFP4.max_value * rows))
    scales = round_e4m3(wanted.clamp(min=SMALLEST_BLOCK_SCALE))
    divisors = scales.view(torch.float8_e4m3fn).float() * rows
    codes = round_e2m1(blocks / divisors[..., None])
    scales = torch.where(finite, scales, SCALE_NAN).to(torch.uint8)
    return BlockScaled(pack_nibbles(codes.flatten(-2)), scales, NVFP4, row_scales)


def encode_rows(x: Tensor) -> BlockScaled:
    """``x [rows, K]`` with a float32 scale of its own for each row, as activations have it."""
    return encode(x, global_scales(row_peaks(x)[:, None])[:, 0])


def _finite_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks in float32, zeros where one is not finite, and which are."""
    blocks = split_blocks(x, NVFP4).float()
    finite = torch.isfinite(blocks).all(dim=-1)
    return torch.where(finite[..., None], blocks, 0.0), finite


def decode(tensor: BlockScaled, dtype: torch.dtype) -> Tensor:
    """The numbers that the codes stand for: exact in float64, else the rounded product."""
    assert tensor.row_scales is not None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scales = tensor.scales.view(torch.float8_e4m3fn).to(wide)
    blocks: Tensor = decode_codes(tensor.values).to(wide).unflatten(-1, (-1, NVFP4.block)) * scales[..., None]
    return (blocks.flatten(-2) * tensor.row_scales.to(wide)[..., None]).to(dtype)
