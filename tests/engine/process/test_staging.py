"""Weights are fetched while torch is imported: the first chunks, no more than may be, and nothing is left behind."""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from microscale.engine.process import __main__ as process
from microscale.engine.process import fetching
from microscale.engine.process.connection import Connection, OwnerGone
from microscale.engine.process.fetching import CHUNK, Fetching, files_of, start_fetching, torch_is_cached, why_not
from microscale.engine.process.loop import Serves
from microscale.engine.process.messages import VERSION, Ahead, EngineConfig, Hello, encode
from microscale.models.checkpoint import Checkpoint
from microscale.models.reading import file as weight_file
from microscale.models.reading.chunks import Reads
from microscale.models.reading.file import Stamp, Way, WeightFile
from microscale.models.reading.page_cache import PAGE, resident_bytes, resident_pages
from microscale.models.reading.read_ahead import THREADS, ReadAhead
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


def test_what_is_there_is_read_by_all_readers_and_never_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file whose first half was fetched: eight threads copy that, two read the rest, and mincore is asked once."""
    read = 1 << 20
    write_tensors(tmp_path, (read,) * (4 * CHUNK // read))
    checkpoint = Checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    settle(path)
    Fetching([path], 2 * CHUNK).wait()
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
    ahead = ReadAhead(entries, torch.device("cpu"), reads=Reads(2, read))
    if set(ahead.ways.values()) != {Way.DIRECT}:
        pytest.skip("this file system refuses direct reads")
    monkeypatch.setattr(os, "preadv", noted)
    with ahead:
        for entry in entries:
            ahead.take(entry.name)
    assert not all_there.broken
    assert len(asked) == 1
    assert directly == [0, 2]
    assert {offset // read for offset in copied} == set(range(2 * CHUNK // read))


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
    assert why_not() is None
    monkeypatch.setattr(fetching, "_is_cached", lambda path: None)
    assert torch_is_cached() is None
    assert why_not() == "this system does not tell whether torch's own files are in the page cache"
    monkeypatch.setattr(fetching, "_is_cached", lambda path: False)
    assert why_not() == "torch's own files are not in the page cache and come from the disk first"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(fetching.CORES - 1)))
    assert why_not() == "7 CPU cores are too few, it takes 8"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert torch_is_cached() is None


def test_a_file_system_that_cannot_be_asked_for_pages_without_waiting(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As overlayfs and tmpfs, where every read with RWF_NOWAIT is refused: the pages are counted instead."""

    def refuses(fd: int, buffers: list[bytearray], offset: int, flags: int = 0) -> int:
        assert flags == os.RWF_NOWAIT, "nothing is waited for"
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "preadv", refuses)
    assert fetching._is_cached(file) is False
    with file.open("rb") as opened:
        opened.read(1)
    assert fetching._is_cached(file) is True
    monkeypatch.setattr(fetching, "resident_pages", lambda fd: None)
    assert fetching._is_cached(file) is None


def test_what_an_import_reads_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytecode of this Python; without any the sources; of a package of libraries those."""
    package = tmp_path / "torch"
    mine = f"{sys.implementation.cache_tag}.pyc"
    for name in ("lib/libtorch.so", "__init__.py", "a.py", f"__pycache__/a.{mine}", "__pycache__/a.another.pyc"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes(b"1")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch")
    for names in ([f"a.{mine}"], ["__init__.py", "a.py"]):
        files = fetching._torch_files()
        assert [path.name for path in files] == names
        for path in files:
            path.unlink()
        (package / "__init__.py").touch()
    monkeypatch.setattr(fetching, "_like", lambda path: [])
    assert [path.name for path in fetching._torch_files()] == ["libtorch.so"]


def test_a_start_says_why_nothing_is_fetched(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where weights are to be read to a GPU; elsewhere nobody would expect it."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(fetching, "has_own_memory", lambda device: device == "cuda")
    here = str(file.parent)
    config = EngineConfig(here, device="cuda")
    assert start_fetching(config, "it rains").num_bytes == 0
    assert start_fetching(EngineConfig(here, device="cuda", tensor_parallel_size=2), None).num_bytes == 0
    for silent in (
        EngineConfig(here, device="cpu"),
        EngineConfig(here, device="cuda", load_format="dummy"),
        EngineConfig("nobody/has-this", device="cuda"),
    ):
        start_fetching(silent, "it rains").stop()
    monkeypatch.setattr(fetching, "_room", lambda: CHUNK - 1)
    short = start_fetching(config, None)
    short.wait()
    short.stop()
    with file.open("rb") as opened:
        while opened.read(CHUNK):
            pass
    warm = Fetching([file], 1 << 30)
    warm.wait()
    warm.stop()
    monkeypatch.setattr(fetching, "resident_pages", lambda fd: None)
    for files in ([file], [file.with_name("gone")]):
        left = Fetching(files, 1 << 30)
        left.wait()
        left.stop()
    assert cached(file) == file.stat().st_size
    assert caplog.messages == [
        "Weights are not fetched ahead: it rains.",
        "Weights are not fetched ahead: each of 2 ranks reads a part of its own.",
        "Weights are not fetched ahead: too little memory is free.",
        "Weights are not fetched ahead: they are in the page cache already.",
        "Weights are not fetched ahead: this system does not tell what of them is in the page cache.",
        "Weights are not fetched ahead: No such file or directory.",
    ]


def test_a_start_says_how_much_was_fetched(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fetched = Fetching([file], 1 << 30)
    fetched.wait()
    fetched.stop()
    (line,) = caplog.messages
    assert re.fullmatch(r"0\.05 GB of weights were fetched ahead, in \d+\.\d\d s\.", line)


def test_what_other_files_have_in_the_page_cache_is_no_less_room(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "MemTotal: 100000 kB\nMemFree: 8 kB\nMemAvailable: {} kB\nCached: 64000 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda path: told.format(64000))
    assert fetching._room() == 8000 * 1024
    monkeypatch.setattr(Path, "read_text", lambda path: told.format(1 << 30))
    assert fetching._room() == fetching.MOST
    monkeypatch.setattr(Path, "read_text", lambda path: "")
    assert fetching._room() == 0


class Ended(Exception):
    """The load has seen enough."""


def load_two_bytes(config: EngineConfig, on_progress: Callable[..., None]) -> Serves:
    """What ``serve`` calls."""
    happened.append(f"load {config.model}")
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
@pytest.mark.parametrize("ahead", [True, False])
def test_an_engine_process_fetches_until_it_loads_and_drops_what_it_has_loaded(
    file: Path, monkeypatch: pytest.MonkeyPatch, pays: bool, ahead: bool
) -> None:
    """From when it is told of the model, whether all else is known by then or not."""
    happened.clear()
    monkeypatch.setattr(process, "why_not", lambda: None if pays else "it does not")
    monkeypatch.setattr(fetching, "has_own_memory", lambda device: True)
    monkeypatch.setattr(fetching, "Fetching", Noting)
    monkeypatch.setattr(process, "start_opening", lambda device: happened.append(f"open {device}"))
    config = EngineConfig(model=str(file.parent), device="cpu")
    told = [Ahead(config), EngineConfig("something else")] if ahead else [config]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for message in (Hello(VERSION), *told):
            ours.sendall(encode(message))
        with pytest.raises(Ended):
            process.serve(Connection(theirs), f"{__name__}:load_two_bytes")
    signal.set_wakeup_fd(-1)
    gc.unfreeze()
    loaded = "something else" if ahead else str(file.parent)
    wanted = ["open cpu", "stop", f"load {loaded}", "0 of 2", "1 of 2", "drop", "2 of 2"]
    assert happened == ([file.name, *wanted] if pays else wanted)


def test_weights_are_fetched_before_load_comes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "why_not", lambda: None)
    monkeypatch.setattr(fetching, "has_own_memory", lambda device: True)
    ours, theirs = socket.socketpair()

    def owner() -> None:
        for message in (Hello(VERSION), Ahead(EngineConfig(model=str(file.parent), device="cpu"))):
            ours.sendall(encode(message))
        while cached(file) < file.stat().st_size:
            time.sleep(0.01)
        ours.close()

    threading.Thread(target=owner).start()
    with theirs, pytest.raises(OwnerGone):
        process.serve(Connection(theirs), f"{__name__}:load_two_bytes")
    signal.set_wakeup_fd(-1)
