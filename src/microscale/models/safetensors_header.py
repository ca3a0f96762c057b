"""The header of a safetensors file, checked before a byte of data is touched.

A file is an 8-byte little-endian length, that many bytes of JSON, then the data. The JSON maps each tensor to its type,
its shape, and its begin and end in the data. The safetensors library checks most of this too, but its messages do not
name the file, and some do not name the tensor.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from microscale.errors import BadCheckpoint
from microscale.models.json_object import JsonObject, parse_json
from microscale.models.reading.file import Stamp

# The library's own bound. The headers of gpt-oss-120b have some 20 kB.
MAX_HEADER_BYTES = 100_000_000

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor is, and what it is."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the end of the header."""
    end: int
    data_begin: int
    """Where the header ends in the file."""
    stamp: Stamp
    """The file's state when its header was read."""

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    @property
    def file_begin(self) -> int:
        """First byte, counted from the file's own."""
        return self.data_begin + self.begin


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of the file. The data is exactly as long as they need: no gap, no overlap, nothing behind them."""
    try:
        with path.open("rb") as file:
            stamp = Stamp.of(os.fstat(file.fileno()))
            file_bytes = stamp.size
            header_bytes = _header_length(path, file.read(8), file_bytes)
            raw = file.read(header_bytes)
    except OSError as exc:
        raise BadCheckpoint(f"{path} cannot be read: {exc.strerror}.") from exc
    if len(raw) < header_bytes:
        raise BadCheckpoint(f"{path} ends within its header; it was cut off while it was read.")
    try:
        header = parse_json(raw)
    except ValueError as exc:
        raise BadCheckpoint(f"{path}: the header is not valid JSON: {exc}.") from exc
    if not isinstance(header, dict):
        raise BadCheckpoint(f"{path}: the header must be a JSON object.")
    data_begin = 8 + header_bytes
    entries = [_entry(path, name, value, data_begin, stamp) for name, value in header.items() if name != "__metadata__"]
    _check_extents(path, entries, file_bytes - data_begin)
    return {entry.name: entry for entry in entries}


def _header_length(path: Path, first: bytes, file_bytes: int) -> int:
    if len(first) < 8:
        raise BadCheckpoint(f"{path} has {file_bytes} bytes, too few for a safetensors file; download it again.")
    length = int(struct.unpack("<Q", first)[0])
    if length > MAX_HEADER_BYTES:
        raise BadCheckpoint(f"{path} claims a header of {length} bytes, more than the {MAX_HEADER_BYTES} allowed.")
    if 8 + length > file_bytes:
        raise BadCheckpoint(f"{path} ends within its header ({file_bytes} bytes); download it again.")
    return length


# Above any tensor, and small enough to multiply and print.
_MAX_SIZE = 1 << 63
_MAX_AXES = 16


def _entry(path: Path, name: str, value: object, data_begin: int, stamp: Stamp) -> TensorEntry:
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path}: the header's entry for {name!r} must be an object.")
    fields = JsonObject(f"{path}, tensor {name!r}", value, error=BadCheckpoint)
    dtype = fields.require("dtype", str)
    if dtype not in DTYPE_BYTES:
        raise fields.fault("dtype", f"is {dtype!r}, which is not a known type")
    shape = fields.require("shape", list)
    offsets = fields.require("data_offsets", list)
    if not all(type(size) is int and 0 <= size < _MAX_SIZE for size in shape) or len(shape) > _MAX_AXES:
        raise fields.fault("shape", "must be a list of sizes")
    if len(offsets) != 2 or not all(type(offset) is int and 0 <= offset < _MAX_SIZE for offset in offsets):
        raise fields.fault("data_offsets", "must be two offsets, begin and end")
    begin, end = offsets
    needed = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != needed:
        raise fields.fault("data_offsets", f"span {end - begin} bytes, but {dtype} {shape} needs {needed}")
    return TensorEntry(path, name, dtype, tuple(shape), begin, end, data_begin, stamp)


def _check_extents(path: Path, entries: list[TensorEntry], data_bytes: int) -> None:
    position, before = 0, "the header"
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin < position:
            raise BadCheckpoint(f"{path}: tensor {entry.name!r} overlaps {before}.")
        if entry.begin > position:
            raise BadCheckpoint(f"{path}: {entry.begin - position} unused bytes between {before} and {entry.name!r}.")
        if entry.end > data_bytes:
            raise BadCheckpoint(
                f"{path} is truncated: tensor {entry.name!r} ends at byte {entry.end} of the data, "
                f"which has only {data_bytes}; download it again."
            )
        position, before = entry.end, repr(entry.name)
    if position != data_bytes:
        raise BadCheckpoint(f"{path}: {data_bytes - position} bytes follow the last tensor, {before}.")
