"""Writes a checkpoint of random weights in the layout in which its family is published, to measure how fast it loads.

Files are cut and ordered as the safetensors library does it: up to 5 GB each, in each the types with the widest numbers
first, then by name. What was written is dropped from the page cache.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from microscale.errors import BadSetting, Unsupported
from microscale.models.checkpoint import INDEX, SINGLE, TensorSpec
from microscale.models.config import CONFIG
from microscale.models.dummy_weights import MXFP4_SCALES
from microscale.models.families import PRESETS, preset
from microscale.models.gpt_oss.config import GptOssConfig, to_hugging_face
from microscale.models.gpt_oss.weights import tensor_table
from microscale.models.safetensors_header import DTYPE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

FILE_BYTES = 5_000_000_000
PIECE = 32 << 20
"""Bytes that are drawn and written at once."""


def write_random_checkpoint(name: str, folder: Path, overrides: Mapping[str, object], seed: int = 0) -> int:
    """Write random weights of a gpt-oss preset's shapes to a folder that is empty or new. Returns the bytes of its
    tensors. The first of the types that each tensor may have is written."""
    if name not in PRESETS:
        raise BadSetting(f"{name!r} is not a preset; presets are {', '.join(PRESETS)}.")
    config = preset(name, overrides)
    if not isinstance(config, GptOssConfig):
        raise Unsupported(f"Random checkpoints of {name} cannot be written; those of gpt-oss can.")
    if folder.exists() and any(folder.iterdir()):
        raise BadSetting(f"{folder} is not empty; name a folder that is, or a new one.")
    folder.mkdir(parents=True, exist_ok=True)
    specs = tensor_table(config).specs()
    shards = _shards(specs)
    names = [SINGLE] if len(shards) == 1 else [_shard_name(number, len(shards)) for number in range(len(shards))]
    draws = torch.Generator().manual_seed(seed)
    for file, shard in zip(names, shards, strict=True):
        _write_file(folder / file, shard, draws)
    total = sum(map(_num_bytes, specs))
    if len(shards) > 1:
        files = {spec.name: file for file, shard in zip(names, shards, strict=True) for spec in shard}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    # Written last: if this is stopped, the folder has no config and is no model.
    (folder / CONFIG).write_text(json.dumps(to_hugging_face(config), indent=2), encoding="utf-8")
    return total


def _shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _num_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * DTYPE_BYTES[spec.dtypes[0]]


def _shards(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + _num_bytes(spec) > FILE_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += _num_bytes(spec)
    return [sorted(shard, key=lambda spec: (-DTYPE_BYTES[spec.dtypes[0]], spec.name)) for shard in shards]


def _write_file(path: Path, shard: Sequence[TensorSpec], draws: torch.Generator) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for spec in shard:
        end = position + _num_bytes(spec)
        header[spec.name] = {"dtype": spec.dtypes[0], "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for spec in shard:
            left = _num_bytes(spec)
            while left:
                piece = _draw(spec, min(left, PIECE), draws)
                file.write(piece.numpy().data)
                left -= piece.numel()
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _draw(spec: TensorSpec, count: int, draws: torch.Generator) -> Tensor:
    """``count`` bytes of a tensor: any codes, small scales, and numbers of ordinary size."""
    words = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(1 << 63), None, generator=draws)
    if spec.dtypes[0] == "BF16":
        # Sign and mantissa are random, magnitudes from 2**-7 to 2**-5.
        halves = words.view(torch.int16).bitwise_and_(-32768 | 0x00FF).bitwise_or_(0x3C00)
        return halves.view(torch.uint8)[:count]
    if spec.dtypes[0] != "U8":
        raise BadSetting(f"Random checkpoints hold BF16 and U8, and {spec.name!r} is {spec.dtypes[0]}.")
    codes = words.view(torch.uint8)[:count]
    if "scales" in spec.name:
        codes = codes.remainder_(len(MXFP4_SCALES)).add_(MXFP4_SCALES.start)
    return codes
