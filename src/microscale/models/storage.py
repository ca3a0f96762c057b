"""How checkpoints store one tensor: which file tensors, with which suffixes, types and shapes, and what they become.

``CONTAINERS`` is the one table of quantised formats on disk, by who wrote the checkpoint. A family's table of tensors
knows names and shapes; ``quantization.py`` reads from a checkpoint's config which module has which format.

Every format becomes what kernels read without loss: codes stay as they are, and scales of a matrix or of 128 x 128
values are repeated, so that parts of a row or of a joined matrix keep their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, TypeAlias

import torch

from microscale.formats import BLOCK, FP8_BLOCK, MXFP4, MXFP8, NVFP4, BlockFormat, BlockScaled, ChannelScaled
from microscale.models.checkpoint import TensorSpec
from microscale.models.reading.parts import RankPart
from microscale.models.sharding import RankSplit
from microscale.parallel.sharding import Shard

if TYPE_CHECKING:
    from torch import Tensor

Weight: TypeAlias = "Tensor | BlockScaled | ChannelScaled"
"""Numbers, or a quantised format as the checkpoint has it."""

FP8_SQUARE = 128
"""Rows and columns under one scale of an FP8 checkpoint with blocks."""


class Extent(Enum):
    """What one entry of a stored tensor is for."""

    BLOCKS = auto()
    """So many columns of so many rows."""
    MATRIX = auto()
    """All of it: a single number."""
    ROWS = auto()
    """A row, or all of the matrix: writers of FP8 choose."""


@dataclass(frozen=True)
class StoredTensor:
    """One of the file tensors that hold a tensor ``[..., rows, K]``."""

    suffix: str
    """Follows the tensor's name."""
    dtypes: tuple[str, ...]
    """The types that it may have, in safetensors' words."""
    block: int = 1
    """Columns of an entry."""
    inner: tuple[int, ...] = ()
    """The axes behind that of blocks."""
    block_rows: int = 1
    """Rows of an entry."""
    extent: Extent = Extent.BLOCKS
    transposed: bool = False
    """The file has ``[..., K, rows]``."""

    def spec(self, name: str, shape: tuple[int, ...]) -> TensorSpec:
        name += self.suffix
        if self.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        if self.extent is Extent.MATRIX:
            return TensorSpec(name, (), self.dtypes, ((1,),))
        if self.extent is Extent.ROWS:
            return TensorSpec(name, (*shape[:-1], 1), self.dtypes, (shape[:-1], (1,), ()))
        # Rounded up: a row that blocks of 32 do not fill is refused by name, since no scales of that shape exist.
        last = -(-shape[-1] // self.block)
        if self.block_rows == 1:
            return TensorSpec(name, (*shape[:-1], last, *self.inner), self.dtypes)
        return TensorSpec(name, (*shape[:-2], -(-shape[-2] // self.block_rows), last), self.dtypes)

    def part(self, split: RankSplit, num_axes: int, shard: Shard) -> RankPart | None:
        """What one rank reads of it, of a tensor with ``num_axes`` axes."""
        is_last = split.axis == num_axes - 1
        if self.extent is Extent.MATRIX or (self.extent is Extent.ROWS and is_last):
            return None
        part = split.part(shard, self.block if is_last else self.block_rows)
        if part is None or not self.transposed or part.axis < num_axes - 2:
            return part
        return replace(part, axis=2 * num_axes - 3 - part.axis)  # the last two change places


Parts: TypeAlias = "tuple[Tensor, ...]"
"""What was read of one matrix. All parts have its rows in front, so that matrices can be joined and stacked."""


@dataclass(frozen=True)
class Storage:
    """How a checkpoint stores a tensor."""

    tensors: tuple[StoredTensor, ...]
    parts: Callable[[Parts], Parts] = lambda read: read
    """From the tensors as they are in the file to parts that can be joined."""
    weight: Callable[[Sequence[Tensor]], Weight] = lambda parts: parts[0]
    """From the joined parts to what the model takes."""
    format: BlockFormat | None = None
    """Of ``weight``, where it is one."""
    channels: bool = False
    """``weight`` has a scale for each row."""
    unread: tuple[str, ...] = ()
    """Suffixes of further tensors, which are not needed to know the weights."""

    def read(self, name: str, read: Callable[[str], Tensor]) -> Parts:
        return self.parts(tuple(read(name + stored.suffix) for stored in self.tensors))


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _numbers(read: Parts) -> Parts:
    """FP16 becomes bf16, which every kernel reads; ``open_checkpoint`` reports it."""
    return tuple(tensor.bfloat16() if tensor.dtype == torch.float16 else tensor for tensor in read)


def _transposed(read: Parts) -> Parts:
    return tuple(tensor.transpose(-2, -1).contiguous() for tensor in _numbers(read))


BF16 = Storage((StoredTensor("", ("BF16", "F16")),), _numbers)
BF16_OR_F32 = Storage((StoredTensor("", ("BF16", "F16", "F32")),), _numbers)
"""Norms and routers are BF16 as published; trainers keep them in float32."""
BF16_MODULE = Storage((StoredTensor(".weight", ("BF16", "F16")),), _numbers)
TRANSPOSED = Storage((StoredTensor("", ("BF16", "F16"), transposed=True),), _transposed)
"""The experts of gpt-oss in BF16."""

# ---- quantised formats -----------------------------------------------------------------------------------------------


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _of_rows(scale: Tensor, rows: int) -> Tensor:
    """float32 ``[rows]`` of a scale for each row, or of one for all."""
    return scale.float().reshape(-1).expand(rows).contiguous()


def block_storage(codes: StoredTensor, scales: StoredTensor, fmt: BlockFormat) -> Storage:
    """Codes and scale bytes as ``BlockScaled`` has them; a block's bytes may have an axis of their own."""

    def parts(read: Parts) -> Parts:
        values, exponents = read
        return _bytes(values).flatten(-1 - len(codes.inner)), _bytes(exponents)

    return Storage((codes, scales), parts, lambda joined: BlockScaled(joined[0], joined[1], fmt), fmt)


def _nvfp4(codes: str, global_scale: str, unread: str, *, divides: bool) -> Storage:
    """``divides``: the file has the number to divide by, and its inverse is multiplied."""

    def parts(read: Parts) -> Parts:
        values, scales, whole = read
        whole = whole.float()
        return values, _bytes(scales), _of_rows(whole.reciprocal() if divides else whole, values.shape[0])

    tensors = (
        StoredTensor(codes, ("U8",), block=2),
        StoredTensor(".weight_scale", ("F8_E4M3",), block=NVFP4.block),
        StoredTensor(global_scale, ("F32",), extent=Extent.MATRIX),
    )
    return Storage(tensors, parts, lambda p: BlockScaled(p[0], p[1], NVFP4, p[2]), NVFP4, unread=(unread,))


_FP8_WEIGHT = StoredTensor(".weight", ("F8_E4M3",))
_FP8_SCALES = ("F32", "BF16", "F16")


def _fp8(scale: str = ".weight_scale") -> Storage:
    """One scale for the matrix or for each row."""

    def parts(read: Parts) -> Parts:
        return _bytes(read[0]), _of_rows(read[1], read[0].shape[0])

    tensors = (_FP8_WEIGHT, StoredTensor(scale, _FP8_SCALES, extent=Extent.ROWS))
    return Storage(tensors, parts, lambda p: ChannelScaled(p[0], p[1]), None, True, (".input_scale",))


def _fp8_squares(scale: str) -> Storage:
    """One scale for 128 x 128 values. Whatever it is called, it is multiplied."""

    def parts(read: Parts) -> Parts:
        values, squares = read
        rows, columns = values.shape
        scales = squares.float().repeat_interleave(FP8_SQUARE, dim=0)[:rows]
        scales = scales.repeat_interleave(FP8_SQUARE // FP8_BLOCK.block, dim=1)[:, : columns // FP8_BLOCK.block]
        return _bytes(values), scales.contiguous()

    tensors = (_FP8_WEIGHT, StoredTensor(scale, _FP8_SCALES, block=FP8_SQUARE, block_rows=FP8_SQUARE))
    return Storage(tensors, parts, lambda p: BlockScaled(p[0], p[1], FP8_BLOCK), FP8_BLOCK, unread=(".input_scale",))


def in_blocks(fp8: Storage) -> Storage:
    """FP8 with scales of rows as blocks, for experts, of which no kernel reads rows' scales."""

    def parts(read: Parts) -> Parts:
        values, scales = fp8.parts(read)
        return values, scales[:, None].expand(-1, values.shape[1] // FP8_BLOCK.block)

    return Storage(fp8.tensors, parts, lambda p: BlockScaled(p[0], p[1], FP8_BLOCK), FP8_BLOCK, unread=fp8.unread)


def mxfp4_blocks(separator: str = "_") -> Storage:
    """MXFP4 as gpt-oss has it. A block's 16 bytes follow those of the block before."""
    blocks = StoredTensor(f"{separator}blocks", ("U8",), BLOCK, inner=(BLOCK // 2,))
    return block_storage(blocks, StoredTensor(f"{separator}scales", ("U8",), BLOCK), MXFP4)


def _mxfp4(codes: str) -> Storage:
    scales = StoredTensor(".weight_scale", ("U8", "F8_E8M0"), BLOCK)
    return block_storage(StoredTensor(codes, ("U8",), block=2), scales, MXFP4)


_MXFP8 = block_storage(_FP8_WEIGHT, StoredTensor(".weight_scale", ("U8", "F8_E8M0"), BLOCK), MXFP8)

CONTAINERS: Mapping[str, Mapping[str, Storage]] = {
    "modelopt": {
        "nvfp4": _nvfp4(".weight", ".weight_scale_2", ".input_scale", divides=False),
        "mxfp8": _MXFP8,
        "fp8": _fp8(),
        "fp8_block": _fp8_squares(".weight_scale"),
    },
    "compressed-tensors": {
        "nvfp4": _nvfp4(".weight_packed", ".weight_global_scale", ".input_global_scale", divides=True),
        "mxfp4": _mxfp4(".weight_packed"),
        "mxfp8": _MXFP8,
        "fp8": _fp8(),
        "fp8_block": _fp8_squares(".weight_scale"),
    },
    "quark": {"mxfp4": _mxfp4(".weight")},
    "fp8": {"fp8": _fp8(), "fp8_block": _fp8_squares(".weight_scale_inv")},
}
"""``quant_method`` of a checkpoint → format → how a module's weight is stored. What is not quantised is BF16."""
DUMMY: Mapping[str, Storage] = {**CONTAINERS["compressed-tensors"], "bf16": BF16_MODULE}
"""One storage of each format, for weights that are in no file."""
KV_SCALES = (".k_scale", ".v_scale")


def storages(container: str | None) -> Mapping[str, Storage]:
    """Format → how a module's weight is stored; ``None``: nothing is quantised."""
    return {**({} if container is None else CONTAINERS[container]), "bf16": BF16_MODULE}
