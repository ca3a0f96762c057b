"""Weights are read to the GPU while torch is imported: every byte, no more than may be, and nothing is left behind.

The driver is a library that is compiled here, whose GPU's memory is the host's; torch's device is then the CPU.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from microscale import hardware
from microscale.backends.ops import Preference
from microscale.engine.loading import load as loading
from microscale.engine.loading.load import load
from microscale.engine.loading.options import LoadOptions
from microscale.engine.loading.prepare import Prepared, prepare
from microscale.engine.process import __main__ as process
from microscale.engine.process import staging, torch_files
from microscale.engine.process.connection import Connection, OwnerGone
from microscale.engine.process.driver import Memory
from microscale.engine.process.loop import Serves
from microscale.engine.process.messages import VERSION, Ahead, EngineConfig, Hello, encode
from microscale.engine.process.staging import (
    Staging,
    files_of,
    same_weights,
    start_staging,
    why_not,
)
from microscale.engine.process.torch_files import torch_is_cached
from microscale.errors import BadCheckpoint
from microscale.models.checkpoint import Checkpoint
from microscale.models.families import write_random_checkpoint
from microscale.models.reading import read_ahead, staged
from microscale.models.reading.chunks import Reads
from microscale.models.reading.file import FileChanged, WeightFile
from microscale.models.reading.page_cache import resident_bytes
from microscale.models.reading.read_ahead import ReadAhead
from microscale.models.reading.staged import Extent, joined
from microscale.models.safetensors_header import TensorEntry
from support.cold_files import settle, write_tensors
from support.stub_driver import StubDriver

CPU = torch.device("cpu")
READ = 1 << 20
"""Bytes of one read ahead, in these tests."""
READS = Reads(2, READ)
SIZES = (0, 1, READ - 1, 3 * READ + 77, 1000, 2 * READ, 5 * READ + 4095, 7)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> StubDriver:
    return StubDriver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(library: StubDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubDriver]:
    """Small reads, and a segment for two and a half of them. Whatever a test does, all is freed at its end."""
    monkeypatch.setattr(staging, "CHUNK", READ)
    monkeypatch.setattr(staging, "SEGMENT", 5 * READ // 2)
    library.reset()
    yield library
    staged.drop()
    assert (library.count("on_gpu"), library.count("pinned")) == (0, 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "stage"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Of a checkpoint, and cold."""
    write_tensors(tmp_path, SIZES)
    return tmp_path / "model.safetensors"


def staged_from(driver: StubDriver, *files: Path) -> Staging:
    """Registered, for loads to the CPU."""
    found = Staging(list(files), "cuda", driver.path, device="cpu:0")
    staged.register(found)
    return found


def wait(staging: Staging) -> Staging:
    """Until all is read, or cannot be."""
    staging._thread.join()
    return staging


def raw(entry: TensorEntry) -> bytes:
    with entry.file.open("rb") as opened:
        opened.seek(entry.file_begin)
        return opened.read(entry.num_bytes)


def read_all(folder: Path, reads: Reads = READS, ahead: int | None = None) -> ReadAhead:
    """Every tensor is what the file holds."""
    entries = list(Checkpoint(folder).entries.values())
    with ReadAhead(entries, CPU, reads=reads, ahead=ahead) as reader:
        found = {entry.name: reader.take(entry.name) for entry in entries}
    for entry in entries:
        assert found[entry.name].shape == entry.shape
        assert bytes(found[entry.name].numpy()) == raw(entry), entry.name
    assert reader._held == 0
    return reader


def total(folder: Path) -> int:
    return sum(entry.num_bytes for entry in Checkpoint(folder).entries.values())


# -- every byte


def test_all_of_a_file_is_on_the_gpu_and_nothing_is_read_again(
    file: Path, driver: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = wait(staged_from(driver, file))
    assert found.num_bytes == driver.count("copied_bytes") == file.stat().st_size
    assert driver.count("pinned") == 0
    monkeypatch.setattr(WeightFile, "read_into", None)
    reader = read_all(file.parent)
    assert reader.taken_staged == reader.taken == total(file.parent)
    assert driver.count("synchronized") == 0
    found.drop()
    assert driver.count("synchronized") == 1, "copies out of it have ended before it is freed"
    assert (driver.count("on_gpu"), found.held) == (0, 0)


@pytest.mark.parametrize("num_bytes", [READ // 4, READ, 8 * READ])
@pytest.mark.parametrize("most", range(0, 12, 2))
def test_what_is_not_there_is_read(
    file: Path, driver: StubDriver, monkeypatch: pytest.MonkeyPatch, most: int, num_bytes: int
) -> None:
    """Tensors end in the midst of what is there, chunks of the load are smaller and larger than those read ahead."""
    monkeypatch.setattr(staging, "_room", lambda free, file_bytes: most * READ)
    found = wait(staged_from(driver, file))
    assert most // 2 * READ <= found.num_bytes <= found.held <= most * READ
    for ahead in (None, 1):
        reader = read_all(file.parent, Reads(2, num_bytes), ahead)
        assert reader.taken_staged <= found.num_bytes
        assert reader.taken_staged > 0 or found.num_bytes < 2 * num_bytes


def test_a_load_to_another_device_reads(file: Path, driver: StubDriver) -> None:
    found = Staging([file], "cuda:3", driver.path)
    staged.register(found)
    assert found.device == "cuda:3"
    assert Staging([], "auto", driver.path).device == "cuda:0"
    wait(found)
    assert read_all(file.parent).taken_staged == 0
    assert staged.held_on(CPU) == 0
    assert staged.held_on(torch.device("cuda:3")) == found.held > 0


def test_several_files_follow_each_other(tmp_path: Path, driver: StubDriver) -> None:
    folders = [tmp_path / str(number) for number in range(3)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        write_tensors(folder, (READ + number, 3 * READ))
    wait(staged_from(driver, *(folder / "model.safetensors" for folder in folders)))
    for folder in folders:
        assert read_all(folder).taken_staged == total(folder)


def test_the_page_cache_does_not_grow(file: Path, driver: StubDriver) -> None:
    def cached() -> int:
        with file.open("rb") as opened:
            found = resident_bytes(opened.fileno())
        assert found is not None
        return found

    before = cached()
    if before:
        pytest.skip("this file system keeps what it was told to drop")
    found = wait(staged_from(driver, file))
    assert found.num_bytes == file.stat().st_size
    assert cached() == 0


def test_the_disk_reads_further_ahead_where_the_gpu_has_room(
    file: Path, driver: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes the tensors comes to the file's end late."""
    monkeypatch.setattr(staging, "GROWTH", 1.0)
    monkeypatch.setattr(staging, "LEFT_FREE", 0)
    entries = list(Checkpoint(file.parent).entries.values())
    usual = read_ahead.AHEAD["cpu"]
    size = file.stat().st_size
    for room in (100 << 30, 3 * size, 2 * staging.SEGMENT):
        driver.reset(free_bytes=size + room)
        found = wait(staged_from(driver, file))
        assert 0 < found.held <= room
        window = min(room - found.held, staged.WINDOW)
        with ReadAhead(entries, CPU) as reader:
            assert reader._ahead == usual + window
        assert (window > 0) == (room > size)
        assert staged.window_on(torch.device("cuda")) == 0
        staged.drop()
        with ReadAhead(entries, CPU) as reader:
            assert reader._ahead == usual


def test_neighbours_are_joined() -> None:
    """In the file and in memory; one copy then brings all of a tensor."""
    extents = [Extent(20, 30, 120), Extent(0, 10, 100), Extent(10, 20, 110), Extent(30, 40, 500), Extent(50, 60, 510)]
    assert joined(extents) == [Extent(0, 30, 100), Extent(30, 40, 500), Extent(50, 60, 510)]


# -- ends


class Slow:
    """Reads that wait until they may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Event()
        read_into = WeightFile.read_into

        def slow(file: WeightFile, memory: memoryview, offset: int, end: int) -> None:
            self.begun.release()
            assert self.go.wait(30)
            read_into(file, memory, offset, end)

        monkeypatch.setattr(WeightFile, "read_into", slow)

    def all_begun(self) -> None:
        for _ in range(staging.THREADS):
            assert self.begun.acquire(timeout=30)


def late(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """From now on a GPU is opened when this is set."""
    may_open = threading.Event()

    def opened(gpu: str, library: str) -> Memory:
        assert may_open.wait(30)
        return Memory(gpu, library)

    monkeypatch.setattr(staging, "Memory", opened)
    return may_open


@pytest.mark.parametrize("room", [1 << 40, 7 * READ])
@pytest.mark.parametrize("opens", [True, False])
def test_the_disk_does_not_wait_for_the_gpu(
    file: Path, driver: StubDriver, monkeypatch: pytest.MonkeyPatch, opens: bool, room: int
) -> None:
    """So many reads begin before it is open, and wait for it. They are for nothing if it cannot be."""
    monkeypatch.setattr(staging, "EARLY", 2)
    monkeypatch.setattr(staging, "_room", lambda free, file_bytes: room)
    read: list[int] = []
    read_into = WeightFile.read_into

    def noted(file: WeightFile, memory: memoryview, offset: int, end: int) -> None:
        read_into(file, memory, offset, end)
        read.append(offset // READ)

    may_open = late(monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(WeightFile, "read_into", noted)
        found = staged_from(driver, file)
        while len(read) < 2 * staging.THREADS:
            time.sleep(0.01)
        time.sleep(0.05)
        assert sorted(read) == list(range(2 * staging.THREADS))
        assert driver.count("on_gpu") == driver.count("pinned") == found.num_bytes == 0
        monkeypatch.setenv("STUB_REFUSES", "nothing" if opens else "context")
        may_open.set()
        wait(found)
    if not opens:
        assert found.num_bytes == 0
        assert len(read) == 2 * staging.THREADS
    elif room < file.stat().st_size:
        assert 4 * READ <= found.num_bytes <= found.held <= room
    else:
        assert found.num_bytes == file.stat().st_size
        assert sorted(read) == list(range(len(read))), "nothing is read twice"
    assert read_all(file.parent).taken_staged <= found.num_bytes


def test_nothing_begins_after_it_was_stopped_and_what_has_begun_is_waited_for(
    file: Path, driver: StubDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    found = staged_from(driver, file)
    slow.all_begun()
    found.stop()
    threading.Timer(0.05, slow.go.set).start()
    assert staged.held_on(CPU) == found.held >= staging.THREADS * READ
    assert found.num_bytes == staging.THREADS * READ
    reader = read_all(file.parent)
    assert found.num_bytes - 2 * READ < reader.taken_staged <= found.num_bytes


def test_the_gpus_memory_is_full(file: Path, driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others took it after it was asked for."""
    monkeypatch.setattr(staging, "_room", lambda free, file_bytes: 1 << 40)
    driver.reset(free_bytes=6 * READ)
    found = wait(staged_from(driver, file))
    assert 3 * READ <= found.num_bytes <= found.held == 5 * READ
    assert read_all(file.parent).taken_staged > 0


@pytest.mark.parametrize("copies", [0, 3])
def test_a_copy_that_fails_is_the_end(file: Path, driver: StubDriver, copies: int) -> None:
    driver.reset(copies_left=copies)
    found = wait(staged_from(driver, file))
    assert found.num_bytes <= copies * READ
    assert found.num_bytes == driver.count("copied_bytes")
    assert read_all(file.parent).taken_staged <= found.num_bytes


def test_a_driver_that_refuses_or_is_not_there(
    file: Path, driver: StubDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for refused in ("init", "context"):
        monkeypatch.setenv("STUB_REFUSES", refused)
        assert wait(staged_from(driver, file)).num_bytes == 0
    wait(Staging([file], "auto", driver.path + ".none"))
    libc = "libc.so.6"
    monkeypatch.setattr("microscale.engine.process.driver.find", lambda device, library: Opened())
    wait(Staging([file], "auto", libc))
    assert caplog.messages[:3] == [
        "Weights are not read ahead: there is no such GPU.",
        "Weights are not read ahead: the GPU cannot be opened.",
        "Weights are not read ahead: there is no such GPU.",
    ]
    assert caplog.messages[3].startswith("Weights are not read ahead: the driver is too old: ")
    assert read_all(file.parent).taken_staged == 0


class Opened:
    """A GPU whose driver lacks functions."""

    def retain(self) -> int:
        return 1


@pytest.mark.parametrize("free_gib", [15, 24, 140])
def test_a_load_keeps_the_memory_that_it_needs(free_gib: int) -> None:
    """gpt-oss-20b: nothing on a card of 16 GiB, a part on one of 24, all on an H200."""
    gib, files = 1 << 30, 13_760_000_000
    room = staging._room(free_gib * gib, files)
    assert room == 0 or room + 1.1 * files + 4 * gib <= free_gib * gib
    assert (room > 0, room > files) == {15: (False, False), 24: (True, False), 140: (True, True)}[free_gib]


def test_no_memory_to_spare_is_said(file: Path, driver: StubDriver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    driver.reset(free_bytes=4 << 30)
    assert wait(staged_from(driver, file)).num_bytes == 0
    assert caplog.messages == ["Weights are not read ahead: too little of the GPU's memory is free."]


# -- files that change


def test_a_file_that_changed_before_its_header_was_read_is_read_again(file: Path, driver: StubDriver) -> None:
    found = wait(staged_from(driver, file))
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"!")
    assert found.num_bytes == file.stat().st_size
    assert read_all(file.parent).taken_staged == 0


def test_a_file_that_changes_while_it_is_loaded_is_refused(file: Path, driver: StubDriver) -> None:
    wait(staged_from(driver, file))
    entries = list(Checkpoint(file.parent).entries.values())
    with ReadAhead(entries, CPU, reads=READS) as reader:
        reader.take("t03")
        os.utime(file, ns=(0, 0))
        with pytest.raises(FileChanged, match=r"changed while it was read; .*Tensor 't05' was being read"):
            reader.take("t05")


def test_a_file_that_changes_while_it_is_read_ahead(
    file: Path, driver: StubDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    slow = Slow(monkeypatch)
    found = staged_from(driver, file)
    slow.all_begun()
    os.utime(file, ns=(0, 0))
    slow.go.set()
    assert wait(found).num_bytes == 0
    (line,) = caplog.messages
    assert re.fullmatch(r"Weights are not read ahead: .*changed while it was read; load it again when.*it\.", line)
    assert read_all(file.parent).taken_staged == 0


def test_a_file_that_is_gone(file: Path, driver: StubDriver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert wait(staged_from(driver, file.with_name("gone"), file)).num_bytes == 0
    found = staged_from(driver, file)
    wait(found)
    file.unlink()
    assert found.num_bytes
    assert caplog.messages[0] == "Weights are not read ahead: No such file or directory."


# -- memory that is held counts as free


def tiny(folder: Path) -> Path:
    write_random_checkpoint("gpt-oss-tiny", folder / "tiny", {})
    path = folder / "tiny" / "model.safetensors"
    settle(path)
    return path


def prepared_from(path: Path) -> Prepared:
    return prepare(LoadOptions(str(path.parent), device="cpu", preference=Preference("reference")))


def test_a_load_takes_what_is_there_and_frees_it(
    tmp_path: Path, driver: StubDriver, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny(tmp_path)
    found = wait(staged_from(driver, path))
    held = driver.count("on_gpu")
    caplog.set_level(logging.INFO)
    heard: list[tuple[int, int]] = []
    load(prepared_from(path), lambda done, all_bytes: heard.append((done, all_bytes)))
    size = total(path.parent)
    assert held > 0
    assert driver.count("on_gpu") == found.held == 0
    assert heard[0] == (0, size)
    assert heard[-1] == (size, size)
    (line,) = [message for message in caplog.messages if message.startswith("Read ")]
    said = rf"Read {size / 1e9:.2f} GB of weights in .* s, .* GB/s \(.*; {size / 1e9:.2f} GB were read ahead\)\."
    assert re.fullmatch(said, line)
    load(prepared_from(path))
    assert "read ahead" not in caplog.messages[-1]


def test_a_load_that_fails_frees_it_too(tmp_path: Path, driver: StubDriver) -> None:
    path = tiny(tmp_path)
    entry = Checkpoint(path.parent).entries["lm_head.weight"]
    with path.open("r+b") as opened:
        opened.seek(entry.file_begin)
        opened.write(b"\xc0\x7f")
    wait(staged_from(driver, path))
    assert driver.count("on_gpu") > 0
    with pytest.raises(BadCheckpoint, match=r"tensor 'lm_head\.weight' contains NaN"):
        load(prepared_from(path))
    assert driver.count("on_gpu") == 0


def test_what_is_held_counts_as_free(tmp_path: Path, driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny(tmp_path)
    free = 40 << 30
    monkeypatch.setattr(hardware, "available_memory", lambda gpu, index=0: free)
    without = prepared_from(path).memory
    found = wait(staged_from(driver, path))
    free -= found.held
    memory = prepared_from(path).memory
    assert memory.available == without.available == 40 << 30
    assert memory.pages() == without.pages()


@pytest.mark.parametrize("fits", [True, False])
def test_what_would_make_a_load_fail_is_freed_before(
    tmp_path: Path, driver: StubDriver, monkeypatch: pytest.MonkeyPatch, fits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan's layouts may take more than the files do."""
    path = tiny(tmp_path)
    found = wait(staged_from(driver, path))
    prepared = prepared_from(path)
    available = prepared.memory.available
    assert available is not None
    needed = found.held + staged.window_on(CPU) + sum(prepared.memory.weights.values())
    monkeypatch.setattr(loading, "WHILE_LOADING", available - needed + (0 if fits else 1))
    caplog.set_level(logging.INFO)
    load(prepared)
    assert any("GB were read ahead)" in message for message in caplog.messages) == fits


# -- the engine process


def test_which_files_are_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "has_own_memory", lambda device: device == "cuda:1")
    monkeypatch.setattr(staging, "torch_has_cuda", lambda: True)
    for name in ("b.safetensors", "a.safetensors", "config.json"):
        (tmp_path / name).write_bytes(b"")
    model = str(tmp_path)
    here = EngineConfig(model=model, device="cuda:1")
    assert [path.name for path in files_of(here)] == ["a.safetensors", "b.safetensors"]
    for other in (
        EngineConfig(model=model, device="cuda:1", load_format="dummy"),
        EngineConfig(model=model, device="cuda:2"),
        EngineConfig(model="gpt-oss-20b", device="cuda:1"),
        EngineConfig(model="nobody/has-this", device="cuda:1"),
        EngineConfig(model="\0", device="cuda:1"),
    ):
        assert files_of(other) == []
        assert not same_weights(here, other)
    assert not same_weights(here, EngineConfig(model=model, device="cuda:1", tensor_parallel_size=2))
    assert same_weights(here, EngineConfig(model=model, device="cuda:1", max_queue=7))
    monkeypatch.setattr(staging, "torch_has_cuda", lambda: False)
    assert files_of(here) == []


def test_whether_torch_comes_from_the_disk_is_known_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import sys
from microscale.engine.process.torch_files import torch_is_cached
print(torch_is_cached(), "torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "False"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(staging.CORES)))
    assert why_not() is None
    monkeypatch.setattr(torch_files, "_is_cached", lambda path: None)
    assert torch_is_cached() is None
    assert why_not() == "this system does not tell whether torch's own files are in the page cache"
    monkeypatch.setattr(torch_files, "_is_cached", lambda path: False)
    assert why_not() == "torch's own files are not in the page cache and come from the disk first"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(staging.CORES - 1)))
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
    assert torch_files._is_cached(file) is False
    with file.open("rb") as opened:
        opened.read(1)
    assert torch_files._is_cached(file) is True
    monkeypatch.setattr(torch_files, "resident_pages", lambda fd: None)
    assert torch_files._is_cached(file) is None


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
        files = torch_files._torch_files()
        assert [path.name for path in files] == names
        for path in files:
            path.unlink()
        (package / "__init__.py").touch()
    monkeypatch.setattr(torch_files, "_like", lambda path: [])
    assert [path.name for path in torch_files._torch_files()] == ["libtorch.so"]


@pytest.fixture
def as_gpu(driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--device cuda`` names the stub's GPU, and torch could use it."""
    monkeypatch.setattr(staging, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(staging, "has_own_memory", lambda device: device == "cuda")
    monkeypatch.setattr(staging.Staging.__init__, "__defaults__", (driver.path, "cpu:0"))


@pytest.mark.usefixtures("as_gpu")
def test_a_start_says_why_nothing_is_read_ahead(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where weights are to be read to a GPU; elsewhere nobody would expect it."""
    caplog.set_level(logging.INFO)
    here = str(file.parent)
    assert start_staging(EngineConfig(here, device="cuda"), "it rains") is None
    assert start_staging(EngineConfig(here, device="cuda", tensor_parallel_size=2), None) is None
    for silent in (
        EngineConfig(here, device="cpu"),
        EngineConfig(here, device="cuda", load_format="dummy"),
        EngineConfig("nobody/has-this", device="cuda"),
    ):
        for reason in (None, "it rains"):
            assert start_staging(silent, reason) is None
    assert caplog.messages == [
        "Weights are not read ahead: it rains.",
        "Weights are not read ahead: each of 2 ranks reads a part of its own.",
    ]
    assert staged._stage is None


@pytest.mark.usefixtures("as_gpu")
def test_a_start_says_how_much_was_read_ahead(
    file: Path, driver: StubDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = EngineConfig(str(file.parent), device="cuda")
    for copies in (1 << 40, 9):
        driver.reset(copies_left=copies)
        found = start_staging(config, None)
        assert found is not None
        wait(found)
        staged.drop()
    driver.reset()
    monkeypatch.setattr(staging, "EARLY", 0)
    may_open = late(monkeypatch)
    found = start_staging(config, None)
    assert found is not None
    found.stop()
    may_open.set()
    wait(found)
    all_of_it, a_part, nothing = caplog.messages
    assert re.fullmatch(r"0\.01 GB of weights were read ahead, in \d+\.\d\d s\.", all_of_it)
    ended = r"0\.01 GB of weights were read ahead, in \d+\.\d\d s\. Then cuMemcpyHtoD_v2 gave 700\."
    assert re.fullmatch(ended, a_part)
    assert nothing == "Weights are not read ahead: there was no time."


class Ended(Exception):
    """The load has seen enough."""


def load_two_bytes(config: EngineConfig, on_progress: Callable[..., None]) -> Serves:
    """What ``serve`` calls."""
    happened.append(f"load {Path(config.model).name}")
    happened.append("with weights" if staged.held_on(CPU) else "with none")
    for done in (0, 1, 2):
        on_progress(done, 2)
        happened.append(f"{done} of 2")
    raise Ended


happened: list[str] = []


@pytest.mark.usefixtures("as_gpu")
@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("ahead", ["the same", "another", None])
def test_an_engine_process_reads_ahead_until_it_loads(
    file: Path, driver: StubDriver, monkeypatch: pytest.MonkeyPatch, pays: bool, ahead: str | None
) -> None:
    """From when it is told of the model, whether all else is known by then or not. ``Load`` decides."""
    happened.clear()
    monkeypatch.setattr(process, "why_not", lambda: None if pays else "it does not")
    stop = Staging.stop

    def opened(device: str) -> None:
        happened.append(f"open {device}")
        while pays and not driver.count("copied_bytes"):
            time.sleep(0.01)

    def noted(self: Staging) -> None:
        happened.append("stop")
        stop(self)

    monkeypatch.setattr(process, "start_opening", opened)
    monkeypatch.setattr(Staging, "stop", noted)
    config = EngineConfig(model=str(file.parent), device="cuda")
    loaded = EngineConfig("something else") if ahead == "another" else config
    told = [loaded] if ahead is None else [Ahead(config), loaded]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for message in (Hello(VERSION), *told):
            ours.sendall(encode(message))
        with pytest.raises(Ended):
            process.serve(Connection(theirs), f"{__name__}:load_two_bytes")
    signal.set_wakeup_fd(-1)
    gc.unfreeze()
    assert happened[0] == "open cuda"
    load = f"load {Path(loaded.model).name}"
    assert ("stop" in happened[: happened.index(load)]) == pays
    held = "with weights" if pays and ahead != "another" else "with none"
    assert [each for each in happened[1:] if each != "stop"] == [load, held, "0 of 2", "1 of 2", "2 of 2"]


@pytest.mark.usefixtures("as_gpu")
def test_weights_are_read_before_load_comes(file: Path, driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "why_not", lambda: None)
    monkeypatch.setattr(process, "start_opening", lambda device: None)
    ours, theirs = socket.socketpair()

    def owner() -> None:
        for message in (Hello(VERSION), Ahead(EngineConfig(model=str(file.parent), device="cuda"))):
            ours.sendall(encode(message))
        while driver.count("copied_bytes") < file.stat().st_size:
            time.sleep(0.01)
        ours.close()

    threading.Thread(target=owner).start()
    with theirs, pytest.raises(OwnerGone):
        process.serve(Connection(theirs), f"{__name__}:load_two_bytes")
    signal.set_wakeup_fd(-1)
