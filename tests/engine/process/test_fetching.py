"""Weights are fetched while torch is imported: the first chunks, no more than may be, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from microscale.engine.process import __main__ as process
from microscale.engine.process import fetching
from microscale.engine.process.connection import Connection
from microscale.engine.process.fetching import CHUNK, Fetching, can_fetch, files_of, torch_is_cached
from microscale.engine.process.loop import Serves
from microscale.engine.process.messages import VERSION, EngineConfig, Hello, encode
from microscale.models.checkpoint import Checkpoint
from microscale.models.reading.file import Stamp, Way, WeightFile
from microscale.models.reading.page_cache import PAGE, resident_bytes, resident_pages
from microscale.models.reading.read_ahead import ReadAhead
from support.cold_files import settle, write_tensors

CHUNKS = 6


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Cold, and with a chunk that is not whole at its end."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(random.Random(0).randbytes(CHUNKS * CHUNK + 5000))
    settle(path)
    if cached(path):
        pytest.skip("this file system keeps what it was told to drop")
    return path


def cached(path: Path) -> int:
    with path.open("rb") as opened:
        found = resident_bytes(opened.fileno())
    assert found is not None
    return found


def test_all_of_a_file_is_fetched_and_dropped(file: Path) -> None:
    fetched = Fetching([file], 1 << 30)
    fetched.wait()
    assert fetched.num_bytes == file.stat().st_size == cached(file)
    fetched.drop()
    fetched.drop()
    for thread in threading.enumerate():
        if thread.name == "drop":
            thread.join()
    assert cached(file) == 0
    assert not fetched._open


def test_no_more_than_may_be_and_the_first_chunks_first(file: Path) -> None:
    fetched = Fetching([file], 3 * CHUNK + 1)
    fetched.wait()
    assert fetched.num_bytes == 3 * CHUNK
    with file.open("rb") as opened:
        pages = resident_pages(opened.fileno())
    assert pages is not None
    assert pages[: 3 * CHUNK // PAGE].all()
    assert not pages[4 * CHUNK // PAGE :].any()  # the system may read a little ahead


def test_what_others_left_in_the_page_cache_stays(file: Path) -> None:
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(opened.fileno(), CHUNK, 2 * CHUNK)
    fetched = Fetching([file], 1 << 30)
    fetched.wait()
    assert fetched.num_bytes == file.stat().st_size - CHUNK
    fetched._drop()
    assert cached(file) == CHUNK


def test_nothing_begins_after_it_was_stopped(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor after an end, or for a model without files here."""
    assert Fetching([]).num_bytes == 0
    begun, go = threading.Semaphore(0), threading.Event()
    advise = os.posix_fadvise

    def slow(fd: int, begin: int, size: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED:
            begun.release()
            go.wait()
        advise(fd, begin, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", slow)
    fetched = Fetching([file], 1 << 30)
    for _ in range(fetching.THREADS):
        begun.acquire()
    fetched.stop()
    go.set()
    fetched.wait()
    assert fetched.num_bytes == fetching.THREADS * CHUNK


def test_a_file_that_is_gone_or_of_which_nothing_is_told_is_left_to_the_load(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = Fetching([file.with_name("gone"), file], 1 << 30)
    fetched.wait()
    assert fetched.num_bytes == 0
    monkeypatch.setattr(fetching, "resident_pages", lambda fd: None)
    fetched = Fetching([file], 1 << 30)
    fetched.wait()
    assert fetched.num_bytes == 0


def test_the_load_reads_from_there_what_was_fetched_and_the_rest_past_it(tmp_path: Path) -> None:
    write_tensors(tmp_path, (2 * CHUNK, 3 * CHUNK + 77, 1000, CHUNK))
    checkpoint = Checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    expected = path.read_bytes()
    settle(path)
    fetched = Fetching([path], 4 * CHUNK)
    fetched.wait()
    before = cached(path)
    entries = list(checkpoint.entries.values())
    with ReadAhead(entries, torch.device("cpu")) as ahead:
        if set(ahead.ways.values()) != {Way.DIRECT}:
            pytest.skip("this file system refuses direct reads")
        for entry in entries:
            begin = entry.file_begin
            assert bytes(ahead.take(entry.name).numpy()) == expected[begin : begin + entry.num_bytes]
    assert cached(path) < before + CHUNK // 4


def test_resident_ranges_are_read_plainly(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = Fetching([file], 2 * CHUNK)
    fetched.wait()
    read: list[tuple[int, int]] = []
    preadv = os.preadv

    def noted(fd: int, buffers: list[memoryview], offset: int) -> int:
        read.append((fd, offset // CHUNK))
        return preadv(fd, buffers, offset)

    with WeightFile(file, Stamp.of(file.stat())) as opened, WeightFile.cold(file) as cold:
        if opened.way is not Way.DIRECT:
            pytest.skip("this file system refuses direct reads")
        monkeypatch.setattr(os, "preadv", noted)
        memory = torch.empty(CHUNK + PAGE, dtype=torch.uint8).numpy().data
        at = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PAGE
        for each in (opened, cold):
            for place in (0, 1, 4):
                each.read_into(memory[at : at + CHUNK], place * CHUNK, (place + 1) * CHUNK)
        assert read[:3] == [(opened._plain, 0), (opened._plain, 1), (opened._direct, 4)]
        assert read[3:] == [(cold._direct, 0), (cold._direct, 1), (cold._direct, 4)]


def test_which_files_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "has_own_memory", lambda device: device == "cuda:1")
    for name in ("b.safetensors", "a.safetensors", "config.json"):
        (tmp_path / name).write_bytes(b"")
    model = str(tmp_path)
    assert [path.name for path in files_of(EngineConfig(model=model, device="cuda:1"))] == [
        "a.safetensors",
        "b.safetensors",
    ]
    for other in (
        EngineConfig(model=model, device="cuda:1", load_format="dummy"),
        EngineConfig(model=model, device="cuda:1", tensor_parallel_size=2),
        EngineConfig(model=model, device="cuda:2"),
        EngineConfig(model="gpt-oss-20b", device="cuda:1"),
        EngineConfig(model="nobody/has-this", device="cuda:1"),
        EngineConfig(model="\0", device="cuda:1"),
    ):
        assert files_of(other) == []


def test_whether_torch_comes_from_the_disk_is_known_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import sys
from microscale.engine.process.fetching import torch_is_cached
print(torch_is_cached(), "torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "False"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(fetching.CORES)))
    assert can_fetch()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(fetching.CORES - 1)))
    assert not can_fetch()
    monkeypatch.setattr(fetching, "_is_cached", lambda path: False)
    assert not torch_is_cached()
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not torch_is_cached()


class Ended(Exception):
    """The load has seen enough."""


def load_two_bytes(config: EngineConfig, on_progress: Callable[..., None]) -> Serves:
    """What ``serve`` calls."""
    happened.append("load")
    for done in (0, 1, 2):
        on_progress(done, 2)
        happened.append(f"{done} of 2")
    on_progress(2, 2, kernels=True)
    raise Ended


happened: list[str] = []


class Noting(Fetching):
    def __init__(self, files: list[Path], most: int | None = None) -> None:
        happened.extend(path.name for path in files)
        super().__init__(files, most)

    def stop(self) -> None:
        happened.append("stop")
        super().stop()

    def drop(self) -> None:
        happened.append("drop")
        super().drop()


@pytest.mark.parametrize("pays", [True, False])
def test_an_engine_process_fetches_until_it_loads_and_drops_what_it_has_loaded(
    file: Path, monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    happened.clear()
    monkeypatch.setattr(process, "can_fetch", lambda: pays)
    monkeypatch.setattr(fetching, "has_own_memory", lambda device: True)
    monkeypatch.setattr(process, "Fetching", Noting)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for message in (Hello(VERSION), EngineConfig(model=str(file.parent), device="cpu")):
            ours.sendall(encode(message))
        with pytest.raises(Ended):
            process.serve(Connection(theirs), f"{__name__}:load_two_bytes")
    signal.set_wakeup_fd(-1)
    gc.unfreeze()
    wanted = ["stop", "load", "0 of 2", "1 of 2", "drop", "2 of 2"]
    assert happened == ([file.name, *wanted] if pays else wanted)
