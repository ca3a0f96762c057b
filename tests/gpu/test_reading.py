"""Weights from disk to a GPU: every byte, while the memory of tensors before is still in use, within bounded memory."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch

from microscale.engine.config import EngineConfig
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import prepare
from microscale.errors import BadCheckpoint
from microscale.hardware import GIB
from microscale.models.checkpoint import Checkpoint
from microscale.models.reading.chunks import READS, SMALL, DiskReads
from microscale.models.reading.read_ahead import ReadAhead
from microscale_lab.model_bench import load as bench_load
from microscale_lab.model_bench.random_checkpoint import write_random_checkpoint

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.starts("gpt-oss-20b", {"num_hidden_layers": 2}),
]

CHUNK = READS["cuda"].num_bytes
SIZES = (0, 1, 4095, SMALL - 1, SMALL, SMALL + 1, CHUNK + 1, 3 * CHUNK + 5) * 4


def write(folder: Path, pad: int) -> Checkpoint:
    header, data, position = {}, [], 0
    for number, size in enumerate(SIZES):
        header[f"t{number:02d}"] = {"dtype": "U8", "shape": [size], "data_offsets": [position, position + size]}
        data.append(os.urandom(size))
        position += size
    text = json.dumps(header).encode() + b" " * pad
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return Checkpoint(folder)


@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("ahead", [1, 1 << 30])
@pytest.mark.parametrize("reads", [READS["cuda"], DiskReads(8, SMALL)], ids=str)
def test_every_byte_arrives_while_the_memory_before_is_in_use(
    pad: int, ahead: int, reads: DiskReads, tmp_path: Path
) -> None:
    """Each tensor is read late by a queue that is kept busy, and its memory is given back at once: a copy that did not
    wait for the queue would overwrite it."""
    device = torch.device("cuda")
    entries = list(write(tmp_path, pad).entries.values())
    copies: list[torch.Tensor] = []
    with ReadAhead(entries, device, reads=reads, ahead=ahead) as reader:
        for entry in entries:
            tensor = reader.take(entry.name)
            torch.cuda._sleep(20_000_000)  # some ms
            copies.append(tensor.cpu() if len(copies) % 8 == 7 else tensor.clone())
            del tensor
    for entry, copy in zip(entries, copies, strict=True):
        with entry.file.open("rb") as file:
            file.seek(entry.file_begin)
            assert copy.cpu().numpy().tobytes() == file.read(entry.num_bytes), entry.name


def test_leaving_early_leaves_no_copy_behind(tmp_path: Path) -> None:
    entries = list(write(tmp_path, 0).entries.values())
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt), ReadAhead(entries, torch.device("cuda")):
            raise KeyboardInterrupt
        probe = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        assert not probe.any()


def test_nan_is_refused_before_a_load_ends(tmp_path: Path) -> None:
    write_random_checkpoint("gpt-oss-tiny", tmp_path / "tiny", {})
    path = tmp_path / "tiny" / "model.safetensors"
    entry = Checkpoint(tmp_path / "tiny").entries["lm_head.weight"]
    data = bytearray(path.read_bytes())
    data[entry.file_begin : entry.file_begin + 2] = b"\xc0\x7f"
    path.write_bytes(data)
    with pytest.raises(BadCheckpoint, match=r"tensor 'lm_head\.weight' contains NaN"):
        load(prepare(EngineConfig(str(tmp_path / "tiny"), device="cuda")))


def test_a_load_stays_within_its_memory(tmp_path: Path) -> None:
    """Two layers of gpt-oss-20b, 3.2 GB: the page cache does not grow, and the process by less than 3 GiB."""
    write_random_checkpoint("gpt-oss-20b", tmp_path / "model", {"num_hidden_layers": 2})
    result = bench_load.run(prepare(EngineConfig(str(tmp_path / "model"), device="cuda")), repeats=1)
    for row in result.rows:
        assert row.page_cache_growth < GIB // 4, row
        assert row.peak_resident - result.resident_before < 1 * GIB, row
