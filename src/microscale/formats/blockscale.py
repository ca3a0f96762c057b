"""What the block formats share: blocks of values along the last axis with one scale byte each.

MXFP4 and MXFP8 have blocks of 32 values and power-of-two scales: an E8M0 byte ``b`` means ``2**(b - 127)``; 255 means
NaN, and 0 is 2**-127, a subnormal float32 and not zero. They have no second scale. NVFP4 has (``nvfp4.py``).

Encoding of the two follows the OCP Microscaling specification 1.0, section 6.3: the shared exponent is
``floor(log2(max|x|))`` less the largest exponent of the element format, limited to what E8M0 holds; elements round to
nearest, ties to even, and saturate. Where the specification leaves the choice open:

* a block of zeros gets scale byte 0 and keeps the sign of each zero;
* a block that contains a NaN or an infinity gets scale byte 255 and elements 0: it decodes to NaN throughout, so that a
  broken tensor is seen and not hidden (neither element format has an infinity);
* subnormal inputs are numbers like any other; what is below half of the smallest element rounds to a signed zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from microscale.errors import Unsupported
from microscale.formats.shape_only import ShapeOnly

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32
"""Values under one scale in the MX formats. A ``BlockFormat`` has its own number."""
SCALE_BIAS = 127
SCALE_NAN = 255


@dataclass(frozen=True)
class BlockFormat:
    """One element format under one scale byte per block."""

    name: str
    bits: int
    max_exponent: int
    max_value: float
    block: int = BLOCK
    scale_bytes: int = 1
    """Four: the scales are float32, not bytes."""
    has_row_scales: bool = False
    """NVFP4: the scale bytes are E4M3, under one more float32 scale. The MX formats have E8M0 and nothing else."""

    @property
    def bytes_per_block(self) -> int:
        """As kernels read it: they hold a float32 scale in two bytes."""
        return self.block * self.bits // 8 + min(self.scale_bytes, 2)

    @property
    def row_bytes(self) -> int:
        """A row's float32 scale, as kernels read it: NVFP4's own, or what float32 scales of blocks are relative to."""
        return 4 if self.has_row_scales or self.scale_bytes == 4 else 0

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of codes and of scales of a tensor of this shape."""
        return (*shape[:-1], shape[-1] * self.bits // 8), (*shape[:-1], shape[-1] // self.block)

    @property
    def bits_per_value(self) -> float:
        """Share of the block's scale included. One float32 per row is nothing."""
        return self.bytes_per_block * 8 / self.block


@dataclass(frozen=True)
class BlockScaled:
    """One logical tensor ``[..., K]`` in a block format.

    ``values`` is u8 ``[..., K * bits / 8]`` (four bits: the low nibble is the even element) and ``scales`` is
    ``[..., K / block]``, u8 or (``fp8_block``) float32. ``row_scales``, of NVFP4 alone, is float32 ``[...]`` and is
    multiplied on top: a checkpoint has one number for each matrix, which all of its rows have here, so that matrices
    can be joined.
    """

    values: Tensor
    scales: Tensor
    format: BlockFormat
    row_scales: Tensor | None = None

    def __post_init__(self) -> None:
        name, block = self.format.name, self.format.block
        if not holds(self.values, 1) or not holds(self.scales, self.format.scale_bytes):
            kinds = "values and scales are bytes" if self.format.scale_bytes == 1 else "has bytes and float32 scales"
            raise Unsupported(f"{name} {kinds}, not {self.values.dtype} and {self.scales.dtype}.")
        blocks = self.values.shape[-1] * 8 // self.format.bits
        if self.values.shape[:-1] != self.scales.shape[:-1] or blocks != self.scales.shape[-1] * block:
            raise Unsupported(
                f"{name} values {tuple(self.values.shape)} and scales {tuple(self.scales.shape)} "
                f"do not belong together: one scale per {block} values."
            )
        rows = self.row_scales
        if (rows is not None) != self.format.has_row_scales:
            raise Unsupported(f"{name} has {'one' if self.format.has_row_scales else 'no'} float32 scale per row.")
        if rows is not None and (rows.shape != self.values.shape[:-1] or not holds(rows, 4)):
            raise Unsupported(f"{name} has one float32 scale per row, not {tuple(rows.shape)} of {rows.dtype}.")

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.values.shape[:-1], self.scales.shape[-1] * self.format.block)

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + (0 if self.row_scales is None else self.row_scales.nbytes)

    def map(self, change: Callable[[Tensor], Tensor]) -> BlockScaled:
        """``change`` of each tensor, for what leaves the last axis as it is."""
        rows = None if self.row_scales is None else change(self.row_scales)
        return BlockScaled(change(self.values), change(self.scales), self.format, rows)

    def __getitem__(self, index: int | slice | list[int] | Tensor | None) -> BlockScaled:
        """A slice along the first axis, which must not be the last one; rows in another order, by their numbers."""
        if self.values.dim() < 2:
            raise Unsupported("A block-scaled vector has no axis to index.")
        return self.map(lambda tensor: tensor[index])

    def to(self, device: torch.device | str) -> BlockScaled:
        return self.map(lambda tensor: tensor.to(device))


def without_memory(shape: tuple[int, ...], fmt: BlockFormat) -> BlockScaled:
    """A tensor of this shape on ``meta``: shapes and types alone."""

    def empty(of: tuple[int, ...], size: int) -> Tensor:
        return torch.empty(of, dtype=torch.uint8 if size == 1 else torch.float32, device="meta")

    values, scales = fmt.shapes(shape)
    rows = empty(shape[:-1], 4) if fmt.has_row_scales else None
    return BlockScaled(empty(values, 1), empty(scales, fmt.scale_bytes), fmt, rows)


def holds(tensor: Tensor | ShapeOnly, num_bytes: int) -> bool:
    """Whether its numbers are bytes (1) or float32 (4)."""
    if isinstance(tensor, ShapeOnly):
        return tensor.itemsize == num_bytes
    return tensor.dtype == (torch.uint8 if num_bytes == 1 else torch.float32)


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


def divided(x: Tensor, by: float) -> Tensor:
    """``x / by``, rounded alike on every device: torch multiplies by the reciprocal of a number on a GPU."""
    return x / torch.full_like(x, by)


def split_blocks(x: Tensor, fmt: BlockFormat) -> Tensor:
    """``[..., K]`` as ``[..., K / block, block]``; K must divide."""
    block = fmt.block
    if x.dim() == 0 or x.shape[-1] % block:
        raise Unsupported(f"{fmt.name} needs a last axis that is a multiple of {block}; the shape is {tuple(x.shape)}.")
    if not x.is_floating_point():
        raise Unsupported(f"{fmt.name} encodes floating-point tensors, not {x.dtype}.")
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def apply_scales(elements: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """``elements [..., K]`` times their block's E8M0 scale, in ``dtype``.

    The product is exact in float64. In float32 and bfloat16 it is the correctly rounded product: values beyond the
    type's largest become infinity (an E2M1 6 under scale 2**127 is 2**129.58), nothing else changes for E2M1.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    blocks = elements.to(wide).reshape(*scales.shape, BLOCK)
    return (blocks * decode_scales(scales, wide)[..., None]).flatten(-2).to(dtype)
