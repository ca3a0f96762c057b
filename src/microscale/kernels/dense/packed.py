"""A dense weight as the kernels read it: bf16 row-major, or 8-bit and 4-bit codes in the fragments of ``layouts``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from microscale.errors import Unsupported
from microscale.formats import BLOCK, FORMATS, MXFP8, BlockScaled, ChannelScaled, decode
from microscale.kernels import layouts
from microscale.kernels.dense.spec import DenseWeights
from microscale.kernels.layouts import RowOrder

if TYPE_CHECKING:
    from torch import Tensor

# Rows packed at a time: the temporaries of gpt-oss's whole lm_head would take several times its own size.
CHUNK_ROWS = 16384
ROW_MAJOR = "row_major"


def layout_name(weight_format: str) -> str:
    """A dense matrix is one expert in plain row order; FP8 has MXFP8's words and no words of scales."""
    if weight_format == "bf16":
        return ROW_MAJOR
    return f"{weight_format}_fragments_{layouts.TILE_ROWS}x{layouts.TILE_K}"


@dataclass(frozen=True)
class PackedDense:
    """One matrix ``[rows, k]``."""

    weight: Tensor  # bf16 [rows, k], or int32 [rows / 16, ceil(k / 64), ...]
    groups: Tensor | None  # int32, the scale words of ``layouts`` for one matrix
    channels: Tensor | None  # float32 [rows]: scales of FP8
    bias: Tensor | None  # bf16 [rows]
    format: str
    rows: int
    k: int

    @property
    def bits(self) -> int:
        return {"bf16": 16, "fp8": 8}[self.format] if self.format not in FORMATS else FORMATS[self.format].bits

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.weight, self.groups, self.channels, self.bias) if t is not None)


def to_row_major(weights: DenseWeights, dtype: torch.dtype) -> DenseWeights:
    """Weights and bias in ``dtype``, decoded where they are not plain numbers."""
    weight = weights.weight
    weight = weight.to(dtype) if isinstance(weight, torch.Tensor) else decode(weight, dtype)
    return DenseWeights(weight.contiguous(), None if weights.bias is None else weights.bias.to(dtype).contiguous())


def row_major(weights: DenseWeights) -> PackedDense:
    """What ``to_row_major`` made in bf16, as the kernels take it."""
    weight = weights.weight
    assert isinstance(weight, torch.Tensor)
    return PackedDense(weight, None, None, weights.bias, "bf16", *weight.shape)


def pack(weights: DenseWeights) -> PackedDense:
    """The weights in fragments, where they are, in chunks of rows."""
    weight = weights.weight
    if isinstance(weight, torch.Tensor):
        raise Unsupported("Fragments hold weights in eight or four bits, not bf16.")
    rows, k = weight.shape
    channels = weight.scales.contiguous() if isinstance(weight, ChannelScaled) else None
    findings = layouts.Findings()
    if channels is not None:
        findings.add_nan(channels, "An fp8 weight has a NaN among its scales; the checkpoint is damaged.")
    words, groups = _pack_chunks(weight, findings, keep_scales=channels is None)
    bias = None if weights.bias is None else weights.bias.bfloat16().contiguous()
    findings.refuse()
    return PackedDense(words, groups, channels, bias, weights.format, rows, k)


def _pack_chunks(
    weight: BlockScaled | ChannelScaled, findings: layouts.Findings, *, keep_scales: bool
) -> tuple[Tensor, Tensor | None]:
    """Words and scale words ``[rows / 16, ...]``; more than these there are never but a few chunks."""
    step = CHUNK_ROWS if layouts.has_numbers(weight.values) else weight.shape[0]
    first = _pack_rows(weight[:step], findings)
    tiles = weight.shape[0] // layouts.TILE_ROWS
    words = first.words.new_empty((tiles, *first.words.shape[2:]))
    groups = first.scales.new_empty((tiles, *first.scales.shape[2:])) if keep_scales else None
    for start in range(0, weight.shape[0], step):
        chunk = first if start == 0 else _pack_rows(weight[start : start + step], findings)
        place = slice(start // layouts.TILE_ROWS, start // layouts.TILE_ROWS + chunk.words.shape[1])
        words[place] = chunk.words[0]
        if groups is not None:
            groups[place] = chunk.scales[0]
    return words, groups


def _pack_rows(weight: BlockScaled | ChannelScaled, findings: layouts.Findings) -> layouts.Packed:
    if isinstance(weight, ChannelScaled):
        ones = torch.full((weight.shape[0], weight.shape[1] // BLOCK), 127, dtype=torch.uint8, device=weight.device)
        weight = BlockScaled(weight.values, ones, MXFP8)
    return layouts.pack(weight[None], RowOrder.PLAIN, None, findings)
