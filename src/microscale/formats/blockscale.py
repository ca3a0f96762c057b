"""What the microscaling formats share: blocks of 32 values along the last axis with one power-of-two scale each.

A scale is an E8M0 byte ``b`` that means ``2**(b - 127)``; 255 means NaN, and 0 is 2**-127, a subnormal float32 and not
zero. Neither MXFP4 nor MXFP8 has a second, per-tensor scale (that is NVFP4).

Encoding follows the OCP Microscaling specification 1.0, section 6.3: the shared exponent is ``floor(log2(max|x|))``
less the largest exponent of the element format, limited to what E8M0 holds; elements round to nearest, ties to even,
and saturate. Where the specification leaves the choice open:

* a block of zeros gets scale byte 0 and keeps the sign of each zero;
* a block that contains a NaN or an infinity gets scale byte 255 and elements 0: it decodes to NaN throughout, so that a
  broken tensor is seen and not hidden (neither element format has an infinity);
* subnormal inputs are numbers like any other; what is below half of the smallest element rounds to a signed zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from microscale.errors import Unsupported
from microscale.formats.shape_only import ShapeOnly

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32
SCALE_BIAS = 127
SCALE_NAN = 255


@dataclass(frozen=True)
class BlockFormat:
    """One element format under E8M0 scales."""

    name: str
    bits: int
    max_exponent: int
    max_value: float

    @property
    def bytes_per_block(self) -> int:
        return BLOCK * self.bits // 8 + 1


@dataclass(frozen=True)
class BlockScaled:
    """One logical tensor ``[..., K]`` in a block format.

    ``values`` is u8 ``[..., K * bits / 8]`` (MXFP4: the low nibble is the even element) and ``scales`` is u8
    ``[..., K / 32]``.
    """

    values: Tensor
    scales: Tensor
    format: BlockFormat

    def __post_init__(self) -> None:
        if not _holds_bytes(self.values) or not _holds_bytes(self.scales):
            raise Unsupported(
                f"{self.format.name} values and scales are bytes, not {self.values.dtype} and {self.scales.dtype}."
            )
        blocks = self.values.shape[-1] * 8 // self.format.bits
        if self.values.shape[:-1] != self.scales.shape[:-1] or blocks != self.scales.shape[-1] * BLOCK:
            raise Unsupported(
                f"{self.format.name} values {tuple(self.values.shape)} and scales {tuple(self.scales.shape)} "
                f"do not belong together: one scale per {BLOCK} values."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.values.shape[:-1], self.scales.shape[-1] * BLOCK)

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def __getitem__(self, index: int | slice | Tensor) -> BlockScaled:
        """A slice along the first axis, which must not be the last one; rows in another order, by their numbers."""
        if self.values.dim() < 2:
            raise Unsupported("A block-scaled vector has no axis to index.")
        return BlockScaled(self.values[index], self.scales[index], self.format)

    def to(self, device: torch.device | str) -> BlockScaled:
        return BlockScaled(self.values.to(device), self.scales.to(device), self.format)


def _holds_bytes(tensor: Tensor | ShapeOnly) -> bool:
    return tensor.itemsize == 1 if isinstance(tensor, ShapeOnly) else tensor.dtype == torch.uint8


def decode_scales(scales: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """E8M0 bytes as numbers, float32 unless another type is named: built from bits, so that 2**-127 survives devices
    that flush subnormal products."""
    raw = scales.to(torch.int32)
    bits = raw << 23
    bits = torch.where(raw == 0, 0x0040_0000, bits)
    bits = torch.where(raw == SCALE_NAN, 0x7FC0_0000, bits)
    return bits.view(torch.float32).to(dtype or torch.float32)


def shared_scales(blocks: Tensor, fmt: BlockFormat) -> tuple[Tensor, Tensor]:
    """Scale bytes for ``blocks [..., 32]`` and the blocks divided by them (zeros where the block is not finite)."""
    x = blocks if blocks.dtype == torch.float64 else blocks.to(torch.float32)
    finite = torch.isfinite(x).all(dim=-1)
    x = torch.where(finite[..., None], x, 0.0)
    largest = x.abs().amax(dim=-1)
    # frexp gives largest = m * 2**e with m in [0.5, 1), so floor(log2(largest)) is e - 1, subnormals included.
    exponent = torch.frexp(largest).exponent - 1 - fmt.max_exponent
    exponent = torch.where(largest == 0, -SCALE_BIAS, exponent).clamp(-SCALE_BIAS, SCALE_BIAS)
    # 2**-exponent lies between 2**-127 and 2**127: a power of two that float32 holds, so the product is exact or the
    # element rounds to zero anyway.
    scaled = x * decode_scales((SCALE_BIAS - exponent).to(torch.uint8), x.dtype)[..., None]
    scales = torch.where(finite, exponent + SCALE_BIAS, SCALE_NAN).to(torch.uint8)
    return scales, scaled if scaled.dtype == torch.float32 else _round_to_odd(scaled)


def _round_to_odd(x: Tensor) -> Tensor:
    """float64 to float32 so that rounding the result once more, to fewer bits, equals rounding ``x`` at once.

    What float32 cannot hold exactly goes towards zero and gets its last bit set: it is then on the right side of
    every midpoint of a coarser format.
    """
    near = x.clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max).to(torch.float32)
    bits = near.view(torch.int32)
    bits = torch.where(near.double().abs() > x.abs(), bits - 1, bits)
    return torch.where(bits.view(torch.float32).double() != x, bits | 1, bits).view(torch.float32)


def split_blocks(x: Tensor, fmt: BlockFormat) -> Tensor:
    """``[..., K]`` as ``[..., K / 32, 32]``; K must divide."""
    if x.dim() == 0 or x.shape[-1] % BLOCK:
        raise Unsupported(f"{fmt.name} needs a last axis that is a multiple of {BLOCK}; the shape is {tuple(x.shape)}.")
    if not x.is_floating_point():
        raise Unsupported(f"{fmt.name} encodes floating-point tensors, not {x.dtype}.")
    return x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)


def apply_scales(elements: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """``elements [..., K]`` times their block's scale, in ``dtype``.

    The product is exact in float64. In float32 and bfloat16 it is the correctly rounded product: values beyond the
    type's largest become infinity (an E2M1 6 under scale 2**127 is 2**129.58), nothing else changes for E2M1.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    blocks = elements.to(wide).reshape(*scales.shape, BLOCK)
    return (blocks * decode_scales(scales, wide)[..., None]).flatten(-2).to(dtype)
