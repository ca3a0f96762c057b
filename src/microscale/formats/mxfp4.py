"""MXFP4: E2M1 elements, two to a byte, the even one in the low nibble.

A nibble is sign, two exponent bits, one mantissa bit: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from microscale.formats.blockscale import BlockFormat, BlockScaled, apply_scales, shared_scales, split_blocks

if TYPE_CHECKING:
    from torch import Tensor

MXFP4 = BlockFormat("mxfp4", bits=4, max_exponent=2, max_value=6.0)

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes 0..15 ``[..., K]`` to bytes ``[..., K / 2]``."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(values: Tensor) -> Tensor:
    """Bytes ``[..., K / 2]`` to codes 0..15 ``[..., K]``."""
    return torch.stack((values & 0xF, values >> 4), dim=-1).flatten(-2)


def round_e2m1(x: Tensor) -> Tensor:
    """The nearest E2M1 codes, ties to the even code, saturating at 6."""
    a = x.abs()
    # Midpoints between neighbours; a tie goes up exactly where the upper neighbour's code is even.
    code = (a > 0.25).to(torch.uint8) + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5.0)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def encode(x: Tensor) -> BlockScaled:
    """``x [..., K]`` in MXFP4; see ``blockscale`` for zeros, NaN and infinities."""
    scales, scaled = shared_scales(split_blocks(x, MXFP4), MXFP4)
    return BlockScaled(pack_nibbles(round_e2m1(scaled).flatten(-2)), scales, MXFP4)


@cache
def _table(device: torch.device) -> Tensor:
    """``VALUES`` on a device. Copied there once: a CUDA graph cannot hold a copy from this process's memory."""
    with torch.inference_mode(False):
        return torch.tensor(VALUES, dtype=torch.float32, device=device)


def decode_codes(values: Tensor) -> Tensor:
    """Bytes ``[..., K / 2]`` to float32 ``[..., K]``, without any scale."""
    return _table(values.device)[unpack_nibbles(values).to(torch.int32)]


def decode(tensor: BlockScaled, dtype: torch.dtype) -> Tensor:
    """The numbers that the codes stand for."""
    return apply_scales(decode_codes(tensor.values), tensor.scales, dtype)
