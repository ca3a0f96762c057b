"""Of a file that is in the page cache in part, that part is read from there, and the rest past it."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from microscale.models.checkpoint import Checkpoint
from microscale.models.reading import file as weight_file
from microscale.models.reading.chunks import DiskReads
from microscale.models.reading.file import PAGE, ReadMethod, Stamp, WeightFile, resident_bytes, resident_pages
from microscale.models.reading.read_ahead import THREADS, ReadAhead
from support.cold_files import write_tensors

CHUNK = 8 << 20


def write_half_cached(folder: Path, sizes: tuple[int, ...], cached: int) -> Path:
    """A file whose first bytes are in the page cache, and no others."""
    write_tensors(folder, sizes)
    path = folder / "model.safetensors"
    if in_cache(path):
        pytest.skip("this file system keeps what it was told to drop")
    with path.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert len(os.pread(opened.fileno(), cached, 0)) == cached
    return path


def in_cache(path: Path) -> int:
    with path.open("rb") as opened:
        found = resident_bytes(opened.fileno())
    assert found is not None
    return found


def test_every_byte_and_the_page_cache_does_not_grow(tmp_path: Path) -> None:
    path = write_half_cached(tmp_path, (2 * CHUNK, 3 * CHUNK + 77, 1000, CHUNK), 4 * CHUNK)
    entries = list(Checkpoint(tmp_path).entries.values())
    before = in_cache(path)
    with ReadAhead(entries, torch.device("cpu")) as ahead:
        if set(ahead.ways.values()) != {ReadMethod.DIRECT}:
            pytest.skip("this file system refuses direct reads")
        found = {entry.name: bytes(ahead.take(entry.name).numpy()) for entry in entries}
    assert in_cache(path) < before + CHUNK // 4
    expected = path.read_bytes()
    for entry in entries:
        assert found[entry.name] == expected[entry.file_begin : entry.file_begin + entry.num_bytes]


def test_resident_ranges_are_read_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_half_cached(tmp_path, (6 * CHUNK,), 2 * CHUNK)
    read: list[tuple[int, int]] = []
    preadv = os.preadv

    def noted(fd: int, buffers: list[memoryview], offset: int) -> int:
        read.append((fd, offset // CHUNK))
        return preadv(fd, buffers, offset)

    with WeightFile(path, Stamp.of(path.stat())) as opened, WeightFile.cold(path) as cold:
        if opened.way is not ReadMethod.DIRECT:
            pytest.skip("this file system refuses direct reads")
        monkeypatch.setattr(os, "preadv", noted)
        memory = torch.empty(CHUNK + PAGE, dtype=torch.uint8).numpy().data
        at = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PAGE
        for each in (opened, cold):
            for place in (0, 1, 4):
                each.read_into(memory[at : at + CHUNK], place * CHUNK, (place + 1) * CHUNK)
        assert read[:3] == [(opened._plain, 0), (opened._plain, 1), (opened._direct, 4)]
        assert read[3:] == [(cold._direct, 0), (cold._direct, 1), (cold._direct, 4)]


def test_what_is_there_is_read_by_all_readers_and_never_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file whose first half is there: eight threads copy that, two read the rest, and mincore is asked once."""
    read = 1 << 20
    write_half_cached(tmp_path, (read,) * (4 * CHUNK // read), 2 * CHUNK)
    checkpoint = Checkpoint(tmp_path)
    asked: list[int] = []

    def counted(fd: int) -> NDArray[np.bool_] | None:
        asked.append(fd)
        return resident_pages(fd)

    monkeypatch.setattr(weight_file, "resident_pages", counted)
    lock, all_there = threading.Lock(), threading.Barrier(THREADS)
    directly = [0, 0]
    """Reads in flight, now and at the most."""
    copied: list[int] = []
    preadv = os.preadv

    def noted(fd: int, buffers: list[memoryview], offset: int) -> int:
        is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        with lock:
            directly[0] += is_direct
            directly[1] = max(directly)
            copied.extend([] if is_direct else [offset])
            waits = not is_direct and len(copied) <= THREADS
        if waits:  # the first reads, until every reader has one
            all_there.wait(30)
        found = preadv(fd, buffers, offset)
        with lock:
            directly[0] -= is_direct
        return found

    entries = list(checkpoint.entries.values())
    ahead = ReadAhead(entries, torch.device("cpu"), reads=DiskReads(2, read))
    if set(ahead.ways.values()) != {ReadMethod.DIRECT}:
        pytest.skip("this file system refuses direct reads")
    monkeypatch.setattr(os, "preadv", noted)
    with ahead:
        for entry in entries:
            ahead.take(entry.name)
    assert not all_there.broken
    assert len(asked) == 1
    assert directly == [0, 2]
    assert {offset // read for offset in copied} == set(range(2 * CHUNK // read))
