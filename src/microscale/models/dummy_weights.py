"""What dummy weights are made of: random numbers for tests of speed and memory without a checkpoint, or shapes alone.

A family's tensor table names each tensor and leaves it to a ``TensorMaker`` what it is made of: ``RandomTensors`` draws
numbers. ``ShapeTensors`` makes tensors without memory, which is all that listing the kernels of a model needs, and
``OutlineTensors`` shapes without torch, for listing its ops.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Protocol, cast

import torch

from microscale.formats import MXFP4, MXFP8, NVFP4, BlockFormat, BlockScaled, ChannelScaled, ShapeOnly, without_memory

if TYPE_CHECKING:
    from torch import Tensor

META = "meta"
"""The device of tensors without memory."""
# Uniform E2M1 codes have an RMS of 2.9; under 2**-9 .. 2**-5 the weights have one of 0.047. At gpt-oss's width a layer
# then adds about 8 to the residual stream, whose RMS is 47 and largest value 193 after 36 layers: far from BF16's end.
MXFP4_SCALES = range(118, 123)
# Those E4M3 codes have an RMS of 0.85; under 2**-7 .. 2**-4 the weights have one of 0.03.
MXFP8_SCALES = range(120, 124)
# E4M3 from 32 to 208 in eighths of a binade, as a group's largest value over 6 is. Under 2**-13 they are near MXFP4's.
NVFP4_SCALES = range(0x60, 0x76)
NVFP4_GLOBAL_SCALE = 2.0**-13
FP8_SCALE = 2.0**-5
SCALES = {MXFP4: MXFP4_SCALES, MXFP8: MXFP8_SCALES, NVFP4: NVFP4_SCALES}


class TensorMaker(Protocol):
    """Makes tensors by name."""

    def normal(
        self,
        name: str,
        shape: tuple[int, ...],
        device: torch.device | str,
        std: float = 0.02,
        mean: float = 0.0,
        *,
        float32: bool = False,
    ) -> Tensor:
        """Numbers that bf16 can hold, as bf16 or as float32."""

    def zero_ids(self, size: int, device: torch.device | str) -> Tensor:
        """Token ids (int64), all 0."""

    def blocks(
        self, name: str, shape: tuple[int, ...], fmt: BlockFormat, device: torch.device | str
    ) -> BlockScaled: ...

    def channels(self, name: str, shape: tuple[int, ...], device: torch.device | str) -> ChannelScaled:
        """FP8 with a scale for each row."""


class RandomTensors:
    """Random numbers, which depend on the seed, the tensor's name and the kind of device, not on the order of calls.

    Block formats are drawn as bytes on the device: no BF16 copy of them ever exists, so that the experts of two layers
    of gpt-oss-120b need 3.4 GB and not 12.7.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def normal(
        self,
        name: str,
        shape: tuple[int, ...],
        device: torch.device | str,
        std: float = 0.02,
        mean: float = 0.0,
        *,
        float32: bool = False,
    ) -> Tensor:
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return tensor.normal_(mean, std, generator=self._generator(name, device)).to(_dtype(float32))

    def zero_ids(self, size: int, device: torch.device | str) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, device=device)

    def blocks(self, name: str, shape: tuple[int, ...], fmt: BlockFormat, device: torch.device | str) -> BlockScaled:
        generator = self._generator(name, device)
        codes_shape, scales_shape = fmt.shapes(shape)
        codes = (_random_codes if fmt.bits == 8 else _random_bytes)(codes_shape, device, generator)
        if fmt.scale_bytes == 4:
            return BlockScaled(codes, torch.full(scales_shape, FP8_SCALE, device=device), fmt)
        scales = _random_scales(scales_shape, SCALES[fmt], device, generator)
        row_scales = torch.full(shape[:-1], NVFP4_GLOBAL_SCALE, device=device) if fmt.has_row_scales else None
        return BlockScaled(codes, scales, fmt, row_scales)

    def channels(self, name: str, shape: tuple[int, ...], device: torch.device | str) -> ChannelScaled:
        codes = _random_codes(shape, device, self._generator(name, device))
        return ChannelScaled(codes, torch.full(shape[:-1], FP8_SCALE, device=device))

    def _generator(self, name: str, device: torch.device | str) -> torch.Generator:
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        return torch.Generator(device=device).manual_seed(int.from_bytes(digest, "little") >> 1)


def _random_bytes(shape: tuple[int, ...], device: torch.device | str, generator: torch.Generator) -> Tensor:
    # 64 bits a draw: eight bytes. K is a multiple of 32, so the bytes are one of 8.
    draws = torch.empty(math.prod(shape) // 8, dtype=torch.int64, device=device)
    return draws.random_(-(1 << 63), None, generator=generator).view(torch.uint8).view(shape)


def _random_codes(shape: tuple[int, ...], device: torch.device | str, generator: torch.Generator) -> Tensor:
    """E4M3, signs and magnitudes from 2**-3 to 1.875: far from NaN, in four binades."""
    return _random_bytes(shape, device, generator).bitwise_and_(0x9F).bitwise_or_(0x20)


def _random_scales(
    shape: tuple[int, ...], values: range, device: torch.device | str, generator: torch.Generator
) -> Tensor:
    return torch.randint(values.start, values.stop, shape, dtype=torch.uint8, device=device, generator=generator)


def _dtype(float32: bool) -> torch.dtype:
    return torch.float32 if float32 else torch.bfloat16


class ShapeTensors:
    """Torch's tensors with shapes and types alone, for kernels that are listed and not run. Matrices have no memory
    (``meta``) on any device.

    Vectors are zeros on the device asked for, since the constructors of models compute with them (they join and scale
    norms): for the first sum or product on ``meta`` torch imports its compiler, which takes more than a second.
    """

    def normal(
        self,
        name: str,
        shape: tuple[int, ...],
        device: torch.device | str,
        std: float = 0.02,
        mean: float = 0.0,
        *,
        float32: bool = False,
    ) -> Tensor:
        return torch.zeros(shape, dtype=_dtype(float32), device=device if len(shape) == 1 else META)

    def zero_ids(self, size: int, device: torch.device | str) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, device=device)

    def blocks(self, name: str, shape: tuple[int, ...], fmt: BlockFormat, device: torch.device | str) -> BlockScaled:
        return without_memory(shape, fmt)

    def channels(self, name: str, shape: tuple[int, ...], device: torch.device | str) -> ChannelScaled:
        values = torch.zeros(shape, dtype=torch.uint8, device=META)
        return ChannelScaled(values, torch.zeros(shape[:-1], device=META))


class OutlineTensors:
    """Makes shapes without torch, for outlines, and counts the bytes that they would take."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def normal(
        self,
        name: str,
        shape: tuple[int, ...],
        device: torch.device | str,
        std: float = 0.02,
        mean: float = 0.0,
        *,
        float32: bool = False,
    ) -> Tensor:
        return self._shape(shape, 4 if float32 else 2)

    def zero_ids(self, size: int, device: torch.device | str) -> Tensor:
        return self._shape((size,), 8)

    def blocks(self, name: str, shape: tuple[int, ...], fmt: BlockFormat, device: torch.device | str) -> BlockScaled:
        sizes = zip(fmt.shapes(shape), (1, fmt.scale_bytes), strict=True)
        values, scales = (self._shape(part, size) for part, size in sizes)
        row_scales = self._shape(shape[:-1], 4) if fmt.has_row_scales else None
        return BlockScaled(values, scales, fmt, row_scales)

    def channels(self, name: str, shape: tuple[int, ...], device: torch.device | str) -> ChannelScaled:
        return ChannelScaled(self._shape(shape, 1), self._shape(shape[:-1], 4))

    def _shape(self, shape: tuple[int, ...], itemsize: int) -> Tensor:
        made = ShapeOnly(shape, itemsize)
        self.num_bytes += made.nbytes
        return cast("Tensor", made)
