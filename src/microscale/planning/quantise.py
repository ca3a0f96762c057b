"""Weights from one format to another, on the device where they are, some rows at a time.

The result is allocated once and filled chunk by chunk, so next to the old and the new weights there is never more than
the float32 copies of one chunk: about 200 MB, where lm_head of gpt-oss as a whole would take three times 2.3 GB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from microscale.formats import (
    FORMATS,
    BlockScaled,
    ChannelScaled,
    block_format,
    decode,
    encode,
    encode_channels,
)

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
    for start in starts:
        coded = _encode(_numbers(flat[start : start + step]), fmt)
        values[start : start + step] = coded.values
        scales[start : start + step] = coded.scales
    values, scales = values.view(*lead, *values.shape[1:]), scales.view(*lead, *scales.shape[1:])
    return BlockScaled(values, scales, block_format(fmt)) if fmt in FORMATS else ChannelScaled(values, scales)


def take_rows(weight: Weight, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows ``[n, K]`` of ``weight [rows, K]`` with these numbers, decoded: an embedding's look-up."""
    if _is_shape(weight):
        return torch.empty((*rows.shape, weight.shape[-1]), dtype=dtype, device=weight.device)
    if isinstance(weight, BlockScaled):
        return decode(BlockScaled(weight.values[rows], weight.scales[rows], weight.format), dtype)
    if isinstance(weight, ChannelScaled):
        return decode(ChannelScaled(weight.values[rows], weight.scales[rows]), dtype)
    return torch.nn.functional.embedding(rows, weight).to(dtype)


def _is_shape(weight: Weight) -> bool:
    """Whether it has no memory (``meta``): it then becomes another shape, and nothing is computed."""
    return weight.device.type == "meta"


def _encode(part: Tensor, fmt: str) -> BlockScaled | ChannelScaled:
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
    return BlockScaled(values, weight.scales.reshape(-1, weight.scales.shape[-1]), weight.format)
