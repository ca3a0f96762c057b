"""Weights from one format to another, on the device where they are, some rows at a time.

The result is allocated once and filled chunk by chunk, so next to the old and the new weights there is never more than
the float32 copies of one chunk: about 200 MB, where lm_head of gpt-oss as a whole would take three times 2.3 GB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from microscale.formats import (
    FORMATS,
    NVFP4,
    BlockScaled,
    ChannelScaled,
    block_format,
    decode,
    encode,
    encode_channels,
)
from microscale.formats.nvfp4 import encode as encode_nvfp4
from microscale.formats.nvfp4 import global_scales, row_peaks

if TYPE_CHECKING:
    from torch import Tensor

Weight: TypeAlias = "Tensor | BlockScaled | ChannelScaled"

CHUNK = 1 << 24
"""Elements converted at a time; an encoder's temporaries take about three float32 numbers for each."""


def format_name(weight: Weight) -> str:
    """The format's name as ``--layer-format`` has it."""
    if isinstance(weight, BlockScaled):
        return weight.format.name
    return "fp8" if isinstance(weight, ChannelScaled) else "bf16"


def convert(weight: Weight, fmt: str) -> Weight:
    """``weight [..., rows, K]`` in the format of this name; as it is where it is that already."""
    if fmt == format_name(weight):
        return weight
    lead = tuple(weight.shape[:-1])
    flat = _flat(weight)
    rows, columns = flat.shape
    step = max(1, CHUNK // max(columns, 1))
    starts = () if _is_shape(flat) else range(0, rows, step)
    if fmt == "bf16":
        out = torch.empty((rows, columns), dtype=torch.bfloat16, device=flat.device)
        for start in starts:
            out[start : start + step] = _numbers(flat[start : start + step])
        return out.view(*lead, columns)
    # One row of zeros says what the coded rows look like.
    like = _encode(torch.zeros((1, columns), dtype=torch.float32), fmt)
    values, scales = (
        torch.empty((rows, *each.shape[1:]), dtype=each.dtype, device=flat.device)
        for each in (like.values, like.scales)
    )
    row_scales = None
    if fmt == NVFP4.name:
        row_scales = torch.empty(rows, dtype=torch.float32, device=flat.device)
        for start in starts:
            row_scales[start : start + step] = row_peaks(_numbers(flat[start : start + step]))
        row_scales = global_scales(row_scales.view(lead)).view(rows)
    for start in starts:
        chunk = slice(start, start + step)
        coded = _encode(_numbers(flat[chunk]), fmt, None if row_scales is None else row_scales[chunk])
        values[chunk] = coded.values
        scales[chunk] = coded.scales
    values, scales = values.view(*lead, *values.shape[1:]), scales.view(*lead, *scales.shape[1:])
    if fmt not in FORMATS:
        return ChannelScaled(values, scales)
    return BlockScaled(values, scales, block_format(fmt), None if row_scales is None else row_scales.view(lead))


def take_rows(weight: Weight, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows ``[n, K]`` of ``weight [rows, K]`` with these numbers, decoded: an embedding's look-up."""
    if _is_shape(weight):
        return torch.empty((*rows.shape, weight.shape[-1]), dtype=dtype, device=weight.device)
    if isinstance(weight, BlockScaled | ChannelScaled):
        return decode(weight[rows], dtype)
    return torch.nn.functional.embedding(rows, weight).to(dtype)


def _is_shape(weight: Weight) -> bool:
    """Whether it has no memory (``meta``): it then becomes another shape, and nothing is computed."""
    return weight.device.type == "meta"


def _encode(part: Tensor, fmt: str, row_scales: Tensor | None = None) -> BlockScaled | ChannelScaled:
    if row_scales is not None:
        return encode_nvfp4(part, row_scales)
    return encode(part, block_format(fmt)) if fmt in FORMATS else encode_channels(part)


def _numbers(part: Weight) -> Tensor:
    return part if isinstance(part, torch.Tensor) else decode(part)


def _flat(weight: Weight) -> Weight:
    """All leading axes as one."""
    if isinstance(weight, torch.Tensor):
        return weight.reshape(-1, weight.shape[-1])
    values = weight.values.reshape(-1, weight.values.shape[-1])
    if isinstance(weight, ChannelScaled):
        return ChannelScaled(values, weight.scales.reshape(-1))
    row_scales = None if weight.row_scales is None else weight.row_scales.reshape(-1)
    return BlockScaled(values, weight.scales.reshape(-1, weight.scales.shape[-1]), weight.format, row_scales)
