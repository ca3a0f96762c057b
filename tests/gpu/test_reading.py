"""Weights from disk to a GPU: every byte, while the memory of tensors before is still in use, within bounded memory."""

from __future__ import annotations

import json
import logging
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from microscale.engine.loading.load import load
from microscale.engine.loading.options import LoadOptions
from microscale.engine.loading.prepare import prepare
from microscale.engine.process.staging import Staging
from microscale.errors import BadCheckpoint
from microscale.hardware import GIB
from microscale.models.checkpoint import Checkpoint
from microscale.models.families import write_random_checkpoint
from microscale.models.reading import staged
from microscale.models.reading.chunks import READS, SMALL, Reads
from microscale.models.reading.read_ahead import ReadAhead
from microscale_lab.model_bench import load as bench_load

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
@pytest.mark.parametrize("reads", [READS["cuda"], Reads(8, SMALL)], ids=str)
def test_every_byte_arrives_while_the_memory_before_is_in_use(
    pad: int, ahead: int, reads: Reads, tmp_path: Path
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
        load(prepare(LoadOptions(str(tmp_path / "tiny"), device="cuda")))


def test_a_load_stays_within_its_memory(tmp_path: Path) -> None:
    """Two layers of gpt-oss-20b, 3.2 GB: the page cache does not grow, and the process by less than 3 GiB."""
    write_random_checkpoint("gpt-oss-20b", tmp_path / "model", {"num_hidden_layers": 2})
    result = bench_load.run(prepare(LoadOptions(str(tmp_path / "model"), device="cuda")), repeats=1)
    for row in result.rows:
        assert row.page_cache_growth < GIB // 4, row
        assert row.peak_resident - result.resident_before < 1 * GIB, row


STAGED = """
import sys
from pathlib import Path
from microscale.engine.process import driver, staging

folder, stops_early = Path(sys.argv[1]), sys.argv[2] == "early"
staging.CHUNK, staging.SEGMENT = 4 << 20, 10 << 20
memory = driver.Memory("cuda")
memory.enter()
before = memory.free()
found = staging.Staging(sorted(folder.glob("*.safetensors")), "cuda")
staging.staged.register(found)
if stops_early:
    while not found.num_bytes:
        pass
    found.stop()
found._thread.join()
assert "torch" not in sys.modules
assert before - memory.free() >= found.held > 0, "it is the GPU's memory"

import torch
from microscale.models.checkpoint import Checkpoint
from microscale.models.reading.read_ahead import ReadAhead
from microscale.models.reading.staged_memory import memory_at

address = found._segments[0]
assert memory_at(address, 4096, torch.device("cuda")).data_ptr() == address, "no copy"
entries = list(Checkpoint(folder).entries.values())
with ReadAhead(entries, torch.device("cuda")) as reader:
    tensors = []
    for entry in entries:
        torch.cuda._sleep(2_000_000)
        tensors.append(reader.take(entry.name))
reserved, free = torch.cuda.memory_reserved(), memory.free()
held = found.held
staging.staged.drop()
assert torch.cuda.memory_reserved() == reserved
assert memory.free() - free >= held, "all of it is free again"
torch.full((held,), 7, dtype=torch.uint8, device="cuda")  # over what was freed
for entry, tensor in zip(entries, tensors, strict=True):
    with entry.file.open("rb") as file:
        file.seek(entry.file_begin)
        assert tensor.cpu().numpy().tobytes() == file.read(entry.num_bytes), entry.name
print(reader.taken_staged, reader.taken, found.device)
"""


@pytest.mark.own("the driver of the GPU that is there")
@pytest.mark.parametrize("ends", ["early", "late"])
@pytest.mark.parametrize("pad", [0, 3])
def test_weights_that_the_driver_brought_before_torch_was_imported(pad: int, ends: str, tmp_path: Path) -> None:
    """Every byte; the GPU's memory is free again; while the GPU is busy, so that nothing is freed before its copy."""
    write(tmp_path, pad)
    command = [sys.executable, "-c", STAGED, str(tmp_path), ends]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    ahead, taken, device = found.stdout.split()
    assert device == "cuda:0"
    assert int(taken) == sum(SIZES)
    assert 0 < int(ahead) <= int(taken)
    if ends == "late":
        assert ahead == taken


def test_a_load_takes_what_was_read_ahead_and_frees_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two layers of gpt-oss-20b: none of its memory counts as taken, and none is when the model is loaded."""
    write_random_checkpoint("gpt-oss-20b", tmp_path / "model", {"num_hidden_layers": 2})
    options = LoadOptions(str(tmp_path / "model"), device="cuda")
    load(prepare(options))  # kernels and libraries take memory the first time
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    found = Staging(sorted((tmp_path / "model").glob("*.safetensors")), "cuda")
    staged.register(found)
    found._thread.join()
    prepared = prepare(options)
    assert found.held > GIB
    assert prepared.memory.available is not None
    assert abs(prepared.memory.available - free) < GIB // 4
    caplog.set_level(logging.INFO)
    model = load(prepared)
    assert found.held == 0
    (line,) = [message for message in caplog.messages if message.startswith("Read ")]
    size = f"{sum(entry.num_bytes for entry in Checkpoint(tmp_path / 'model').entries.values()) / 1e9:.2f} GB"
    assert line.startswith(f"Read {size} of weights in ")
    assert line.endswith(f"; {size} were read ahead).")
    del model
    torch.cuda.empty_cache()
    assert abs(torch.cuda.mem_get_info()[0] - free) < GIB // 4
