"""FP8 with one scale per channel: E4M3 elements (0x7F and 0xFF are NaN) under one float32 scale for each row.

The scale is the row's largest magnitude over 448, so the largest element is always exact; elements round to nearest,
ties to even, and saturate. Where others differ:

* a row of zeros gets scale 1 and keeps the sign of each zero;
* a row that contains a NaN or an infinity gets scale NaN and elements 0: it decodes to NaN throughout, so that a broken
  tensor is seen and not hidden;
* a scale is never below float32's smallest normal number, for devices that flush subnormals would read zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from microscale.errors import Unsupported
from microscale.formats.blockscale import divided, holds
from microscale.formats.mxfp8 import MXFP8, round_e4m3

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_SCALE = 2.0**-126
"""float32's smallest normal number."""


@dataclass(frozen=True)
class ChannelScaled:
    """One logical tensor ``[..., rows, K]``: ``values`` u8 of that shape, ``scales`` float32 ``[..., rows]``."""

    values: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        if not holds(self.values, 1) or not holds(self.scales, 4):
            raise Unsupported(
                f"fp8 values are bytes and scales float32, not {self.values.dtype} and {self.scales.dtype}."
            )
        if self.values.shape[:-1] != self.scales.shape:
            raise Unsupported(
                f"fp8 values {tuple(self.values.shape)} and scales {tuple(self.scales.shape)} do not belong together: "
                f"one scale per row."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def map(self, change: Callable[[Tensor], Tensor]) -> ChannelScaled:
        """``change`` of both tensors, for what leaves the last axis as it is."""
        return ChannelScaled(change(self.values), change(self.scales))

    def __getitem__(self, index: int | slice | list[int] | Tensor) -> ChannelScaled:
        """A slice along the first axis, which must not be the last one; rows in another order, by their numbers."""
        if self.values.dim() < 2:
            raise Unsupported("A channel-scaled vector has no axis to index.")
        return self.map(lambda tensor: tensor[index])

    def to(self, device: torch.device | str) -> ChannelScaled:
        return self.map(lambda tensor: tensor.to(device))


def encode(x: Tensor) -> ChannelScaled:
    """``x [..., rows, K]`` in FP8, computed in float32."""
    if x.dim() == 0 or not x.is_floating_point():
        raise Unsupported(f"fp8 encodes rows of floating-point numbers, not {x.dtype} of shape {tuple(x.shape)}.")
    x = x.float()
    finite = torch.isfinite(x).all(dim=-1)
    x = torch.where(finite[..., None], x, 0.0)
    largest = x.abs().amax(dim=-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    scales = torch.where(largest == 0, 1.0, divided(largest, MXFP8.max_value).clamp(min=SMALLEST_SCALE))
    return ChannelScaled(round_e4m3(x / scales[..., None]), torch.where(finite, scales, torch.nan))


def decode(tensor: ChannelScaled, dtype: torch.dtype) -> Tensor:
    """The numbers that the codes stand for: exact in float64, else the rounded product."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (tensor.values.view(torch.float8_e4m3fn).to(wide) * tensor.scales.to(wide)[..., None]).to(dtype)
