"""Weights from one format to another, on the device where they are, some rows at a time.

The result is allocated once and filled chunk by chunk, so beside the old and the new weights there is never more than
the float32 copies of one chunk: about 200 MB, where lm_head of gpt-oss as a whole would take three times 2.3 GB.
"""

from __future__ import annotations

import torch
from torch import Tensor

from microscale.formats import (
    FORMATS,
    BlockScaled,
    ChannelScaled,
    block_format,
    decode,
    encode,
    encode_channels,
)

Weight = Tensor | BlockScaled | ChannelScaled

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
    # Shapes alone (``meta``) take no memory: all at once.
    step = rows if flat.device.type == "meta" else max(1, CHUNK // max(columns, 1))
    if fmt == "bf16":
        out = torch.empty((rows, columns), dtype=torch.bfloat16, device=flat.device)
        for start in range(0, rows, step):
            out[start : start + step] = _numbers(flat[start : start + step])
        return out.view(*lead, columns)
    values = scales = None
    for start in range(0, rows, step):
        part = _numbers(flat[start : start + step])
        coded = encode(part, block_format(fmt)) if fmt in FORMATS else encode_channels(part)
        if values is None or scales is None:
            values = coded.values.new_empty((rows, *coded.values.shape[1:]))
            scales = coded.scales.new_empty((rows, *coded.scales.shape[1:]))
        values[start : start + step] = coded.values
        scales[start : start + step] = coded.scales
    assert values is not None  # a weight has rows
    assert scales is not None
    values, scales = values.view(*lead, *values.shape[1:]), scales.view(*lead, *scales.shape[1:])
    return BlockScaled(values, scales, block_format(fmt)) if fmt in FORMATS else ChannelScaled(values, scales)


def take_rows(weight: Weight, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows ``[n, K]`` of ``weight [rows, K]`` with these numbers, decoded: an embedding's look-up."""
    if isinstance(weight, BlockScaled):
        return decode(BlockScaled(weight.values[rows], weight.scales[rows], weight.format), dtype)
    if isinstance(weight, ChannelScaled):
        return decode(ChannelScaled(weight.values[rows], weight.scales[rows]), dtype)
    return torch.nn.functional.embedding(rows, weight).to(dtype)


def _numbers(part: Weight) -> Tensor:
    return part if isinstance(part, Tensor) else decode(part)


def _flat(weight: Weight) -> Weight:
    """All leading axes as one."""
    if isinstance(weight, Tensor):
        return weight.reshape(-1, weight.shape[-1])
    values = weight.values.reshape(-1, weight.values.shape[-1])
    if isinstance(weight, ChannelScaled):
        return ChannelScaled(values, weight.scales.reshape(-1))
    return BlockScaled(values, weight.scales.reshape(-1, weight.scales.shape[-1]), weight.format)
