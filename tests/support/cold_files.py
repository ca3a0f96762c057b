"""Files of weights on disk, cold."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path


def settle(path: Path) -> None:
    """On disk, and out of the page cache, so that it is read as a cold file is."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_tensors(folder: Path, sizes: tuple[int, ...]) -> None:
    """Random tensors of so many bytes in ``model.safetensors``."""
    header, position = {}, 0
    for number, size in enumerate(sizes):
        header[f"t{number:02d}"] = {"dtype": "U8", "shape": [size], "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    data = random.Random(position).randbytes(position)
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    settle(path)
