"""Reading weights: every byte, whatever its place in the file; no more than the window ahead; and files that fail."""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path

import pytest
import torch

from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import prepare
from microscale.errors import BadCheckpoint
from microscale.models.checkpoint import INDEX, Checkpoint, FromCheckpoint
from microscale.models.families import open_weights
from microscale.models.reading import nan_check, read_ahead
from microscale.models.reading.chunks import READS, SMALL, DiskReads, ReadChunk, block_begin, block_end, cut
from microscale.models.reading.file import BLOCK, FileChanged, ReadMethod, Stamp, WeightFile, resident_bytes
from microscale.models.reading.nan_check import NanCheck
from microscale.models.reading.read_ahead import THREADS, ReadAhead
from microscale.models.reading.targets import Buffer, Buffers, HostTargets, Landing
from microscale.models.safetensors_header import TensorEntry
from microscale_lab.model_bench.random_checkpoint import write_random_checkpoint
from support.cold_files import settle
from support.family_cases import CASES, ONE_OF_EACH

CPU = torch.device("cpu")
CHUNK = READS["cpu"].num_bytes
SIZES = (0, 1, BLOCK - 1, BLOCK, SMALL - 1, SMALL, SMALL + 1, CHUNK + 1)


def write(folder: Path, sizes: tuple[int, ...] = SIZES, pad: int = 0, dtype: str = "U8") -> Checkpoint:
    """Tensors of so many bytes, one behind the other, after a header that is ``pad`` bytes longer than it must be."""
    header, data, position = {}, [], 0
    width = {"U8": 1, "BF16": 2}[dtype]
    for number, wanted in enumerate(sizes):
        size = wanted - wanted % width
        offsets = [position, position + size]
        header[f"t{number:02d}"] = {"dtype": dtype, "shape": [size // width], "data_offsets": offsets}
        values = torch.randint(0, 128, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
        data.append(bytes(values.numpy()))
        position += size
    text = json.dumps(header).encode() + b" " * pad
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))
    settle(path)
    return Checkpoint(folder)


class ThroughBuffers(HostTargets):
    """Nothing is read in place, as on a GPU."""

    def reads_in_place(self, entry: TensorEntry) -> bool:
        return False


def raw(entry: TensorEntry) -> bytes:
    with entry.file.open("rb") as file:
        file.seek(entry.file_begin)
        return file.read(entry.num_bytes)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.view(torch.uint8).numpy())


# -- every byte


@pytest.mark.parametrize("pad", [0, 1, 7, 8, 4095])
@pytest.mark.parametrize("dtype", ["U8", "BF16"])
@pytest.mark.parametrize("num_bytes", [CHUNK, 1 << 16])
@pytest.mark.parametrize("make", [HostTargets, ThroughBuffers])
def test_every_byte_wherever_a_tensor_lies(
    pad: int, dtype: str, num_bytes: int, make: Callable[[], HostTargets], tmp_path: Path
) -> None:
    entries = list(write(tmp_path, pad=pad, dtype=dtype).entries.values())
    with ReadAhead(entries, CPU, reads=DiskReads(3, num_bytes), targets=make()) as ahead:
        found = {entry.name: ahead.take(entry.name) for entry in entries}
    for entry in entries:
        assert found[entry.name].shape == entry.shape
        assert as_bytes(found[entry.name]) == raw(entry), entry.name


def test_any_order_and_a_window_smaller_than_a_tensor(tmp_path: Path) -> None:
    entries = list(write(tmp_path).entries.values())
    for order in (entries, entries[::-1], entries[::2] + entries[1::2]):
        with ReadAhead(entries, CPU, reads=DiskReads(2, CHUNK), ahead=1) as ahead:
            for entry in order:
                assert as_bytes(ahead.take(entry.name)) == raw(entry)
        assert ahead.taken == ahead.total == sum(entry.num_bytes for entry in entries)


def test_several_files_are_one_queue(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    files: dict[str, str] = {}
    for number in range(3):
        part = tmp_path / str(number)
        part.mkdir()
        write(part, sizes=(SMALL + number, CHUNK + number))
        text = (part / "model.safetensors").read_bytes()
        renamed = text.replace(b'"t00"', f'"a{number}0"'.encode()).replace(b'"t01"', f'"a{number}1"'.encode())
        name = f"model-{number + 1:05d}-of-00003.safetensors"
        (weights / name).write_bytes(renamed)
        files |= {f"a{number}0": name, f"a{number}1": name}
    (weights / INDEX).write_text(json.dumps({"weight_map": files}))
    entries = list(Checkpoint(weights).entries.values())
    with ReadAhead(entries, CPU) as ahead:
        assert len(ahead.ways) == 3
        for entry in entries:
            assert as_bytes(ahead.take(entry.name)) == raw(entry)


def test_large_tensors_are_read_in_place(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, sizes=(100, CHUNK + 100), pad=8)
    entry = checkpoint.entries["t01"]
    tensor = checkpoint.read("t01", CPU)
    # Read in place, it lies at the same distance from a block as in the file; a copy would begin anywhere.
    assert tensor.data_ptr() % BLOCK == entry.file_begin % BLOCK
    assert tensor.untyped_storage().nbytes() <= entry.num_bytes + 2 * BLOCK


def test_where_nothing_is_read_in_place_reads_are_large_and_in_the_order_of_the_file(tmp_path: Path) -> None:
    """A tensor's end and the next one's begin are one read: all but the last end at a multiple of its bytes."""
    entries = list(write(tmp_path, sizes=(SMALL + 3, 5, 3 * SMALL, 2 * SMALL - 1) * 3, pad=11).entries.values())
    chunks = cut(entries, 4 * SMALL, ThroughBuffers().reads_in_place)
    assert [chunk.begin for chunk in chunks][1:] == [4 * SMALL * number for number in range(1, len(chunks))]
    pieces = [piece for chunk in chunks for piece in chunk.pieces]
    assert all(before.end == piece.begin for before, piece in pairwise(pieces))
    assert (pieces[0].begin, pieces[-1].end) == (entries[0].file_begin, entries[-1].stamp.size)


def test_small_neighbours_are_read_together(tmp_path: Path) -> None:
    entries = list(write(tmp_path, sizes=(1000,) * 300 + (SMALL,) + (1000,) * 300).entries.values())
    for order in (entries, entries[::-1]):
        assert len(cut(order, CHUNK, HostTargets().reads_in_place)) == 3, "the order within a few MB is the file's"
        assert len(cut(order, CHUNK, ThroughBuffers().reads_in_place)) == 1


@pytest.mark.parametrize("in_place", [HostTargets().reads_in_place, ThroughBuffers().reads_in_place])
@pytest.mark.parametrize("pad", [0, 1, 4000])
def test_the_blocks_around_a_chunk_fit_a_buffer(
    pad: int, in_place: Callable[[TensorEntry], bool], tmp_path: Path
) -> None:
    sizes = (SMALL - 1,) * 20 + (CHUNK + 1, 3) * 3
    chunks = cut(list(write(tmp_path, sizes=sizes, pad=pad).entries.values()), CHUNK, in_place)
    assert max(block_end(chunk.end) - block_begin(chunk.begin) for chunk in chunks) <= CHUNK
    assert sum(chunk.num_bytes for chunk in chunks) == sum(sizes)


# -- the window


def test_no_more_than_the_window_is_read_ahead(tmp_path: Path) -> None:
    entries = list(write(tmp_path, sizes=(SMALL,) * 20).entries.values())
    with ReadAhead(entries, CPU, reads=DiskReads(4, CHUNK), ahead=3 * SMALL) as ahead:
        for entry in entries:
            time.sleep(0.01)  # long enough to read everything
            with ahead._arrived:
                assert ahead._held <= (3 + 4) * SMALL
            ahead.take(entry.name)
    assert ahead._held == 0


def parts(names: list[str]) -> list[str]:
    """The layers' numbers, and what stands before and after them, in their order."""
    found = (re.search(r"(?:layers|block)\.(\d+)\.", name) for name in names)
    return [part for part, _ in groupby(match[1] if match else name for match, name in zip(found, names, strict=True))]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_model_takes_its_tensors_in_the_order_that_it_states(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer by layer: the window then never fills with a layer that is not needed yet."""
    options = CASES[name].options(CASES[name].write(tmp_path), backend="reference")
    prepared = prepare(options)
    assert isinstance(prepared.weights, FromCheckpoint)
    stated = [entry.name for entry in prepared.weights.entries]
    taken, take = [], ReadAhead.take

    def listed(self: ReadAhead, name: str) -> torch.Tensor:
        taken.append(name)
        return take(self, name)

    monkeypatch.setattr(ReadAhead, "take", listed)
    load(prepared)
    assert sorted(taken) == sorted(stated), "each is read once"
    assert taken == stated
    assert len(parts(stated)) <= prepared.config.num_layers + 3


# -- how many reads


class Reading:
    """Which ranges are being read, by the real reads, each a little longer than it takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offsets: list[int] = []
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()
        read_into = WeightFile.read_into

        def watched(file: WeightFile, memory: memoryview, offset: int, end: int) -> None:
            with self._lock:
                self.offsets.append(offset)
                self._now += 1
                self.most = max(self.most, self._now)
            time.sleep(0.01)
            read_into(file, memory, offset, end)
            with self._lock:
                self._now -= 1

        monkeypatch.setattr(WeightFile, "read_into", watched)


@pytest.mark.parametrize("in_flight", [1, 2, 3, THREADS + 2])
def test_a_disk_has_no_more_reads_at_a_time_than_it_is_given(
    in_flight: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = list(write(tmp_path, sizes=(SMALL,) * 24).entries.values())
    reading = Reading(monkeypatch)
    with ReadAhead(entries, CPU, reads=DiskReads(in_flight, SMALL)) as ahead:
        if set(ahead.ways.values()) != {ReadMethod.DIRECT}:
            pytest.skip("this file system refuses direct reads")
        for entry in entries:
            ahead.take(entry.name)
    assert reading.most == in_flight
    if in_flight == 1:
        assert reading.offsets == sorted(reading.offsets)


def test_when_the_window_has_room_again_all_reads_begin_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = list(write(tmp_path, sizes=(4 * SMALL, 4 * SMALL)).entries.values())
    reading = Reading(monkeypatch)
    with ReadAhead(entries, CPU, reads=DiskReads(4, SMALL), ahead=4 * SMALL) as ahead:
        if set(ahead.ways.values()) != {ReadMethod.DIRECT}:
            pytest.skip("this file system refuses direct reads")
        with ahead._arrived:
            assert ahead._arrived.wait_for(lambda: ahead._pending["t00"].left == 0, timeout=10)
        reading.most = 0
        for entry in entries:
            ahead.take(entry.name)
    assert reading.most == 4


def test_what_is_in_the_page_cache_is_read_by_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the rest of the file is not, and is read from the disk."""
    entries = list(write(tmp_path, sizes=(SMALL,) * 32).entries.values())
    with entries[0].file.open("rb") as file:
        file.read()
        os.posix_fadvise(file.fileno(), block_end(entries[24].file_begin), 0, os.POSIX_FADV_DONTNEED)
    reading = Reading(monkeypatch)
    with ReadAhead(entries, CPU, reads=DiskReads(1, SMALL)) as ahead:
        if set(ahead.ways.values()) != {ReadMethod.DIRECT}:
            pytest.skip("this file system refuses direct reads")
        for entry in entries[:24]:
            assert as_bytes(ahead.take(entry.name)) == raw(entry)
        assert reading.most > 4
        for entry in entries[24:]:
            assert as_bytes(ahead.take(entry.name)) == raw(entry)


class Late(ThroughBuffers):
    """The first chunk's copy waits until it may end."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self._first = True

    def copy(self, chunk: ReadChunk, source: torch.Tensor, buffer: Buffer, landings: dict[str, Landing]) -> None:
        first, self._first = self._first, False
        if first:
            assert self.may_end.wait(30)
        super().copy(chunk, source, buffer, landings)


def test_the_disk_is_read_on_while_a_copy_takes_long(tmp_path: Path) -> None:
    entries = list(write(tmp_path, sizes=(SMALL,) * 20).entries.values())
    targets = Late()
    with ReadAhead(entries, CPU, reads=DiskReads(1, SMALL), targets=targets) as ahead:
        for entry in entries[2:]:  # the header shifts each by some bytes: the first chunk has a part of two of them
            assert as_bytes(ahead.take(entry.name)) == raw(entry)
        targets.may_end.set()
        for entry in entries[:2]:
            assert as_bytes(ahead.take(entry.name)) == raw(entry)


class Copying:
    """Stands for the event behind a copy."""

    def __init__(self) -> None:
        self.done = False
        self.waited = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waited = True


def copying(buffer: Buffer) -> Copying:
    event = Copying()
    buffer.copied = event
    return event


def test_the_buffer_that_came_back_last_is_used_first_and_few_are_made() -> None:
    buffers = Buffers(lambda: torch.empty(1), most=3)
    first, second = buffers.take(), buffers.take()
    buffers.give_back(first)
    buffers.give_back(second)
    assert buffers.take() is second
    event = copying(second)
    buffers.give_back(second)
    assert buffers.take() is first, "the other is being copied"
    third = buffers.take()
    assert third not in (first, second), "one is being copied and one is in use"
    copying(third)
    buffers.give_back(third)
    assert buffers.take() is second, "no more are made: the oldest copy is waited for"
    assert event.waited


# -- how a file is read


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger="microscale.models.reading.file")
    return caplog


def test_a_cold_file_is_read_past_the_page_cache(tmp_path: Path) -> None:
    entries = list(write(tmp_path, sizes=(4 * CHUNK, 100)).entries.values())
    with ReadAhead(entries, CPU) as ahead:
        if set(ahead.ways.values()) != {ReadMethod.DIRECT}:
            pytest.skip("this file system refuses direct reads")
        for entry in entries:
            ahead.take(entry.name)
    with entries[0].file.open("rb") as file:
        cached = resident_bytes(file.fileno())
    assert cached is not None
    assert cached < CHUNK // 4, "the header's pages alone"


def test_a_file_in_the_page_cache_is_read_from_there(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, sizes=(CHUNK,))
    (tmp_path / "model.safetensors").read_bytes()
    with ReadAhead(list(checkpoint.entries.values()), CPU) as ahead:
        assert set(ahead.ways.values()) == {ReadMethod.CACHED}
        assert as_bytes(ahead.take("t00")) == raw(checkpoint.entries["t00"])


def test_plain_reads_leave_nothing_in_the_page_cache(tmp_path: Path) -> None:
    entry = write(tmp_path, sizes=(4 * CHUNK,)).entries["t00"]
    memory = mmap.mmap(-1, 5 * CHUNK)
    with WeightFile(entry.file, entry.stamp, direct=False) as file:
        assert file.way is ReadMethod.PLAIN
        file.read_into(memoryview(memory), 0, entry.stamp.size)
    assert memory[: entry.stamp.size] == entry.file.read_bytes()
    settle(entry.file)
    with WeightFile(entry.file, entry.stamp, direct=False) as file:
        file.read_into(memoryview(memory), 0, entry.stamp.size)
        assert (resident_bytes(file._plain) or 0) < CHUNK // 4


def test_where_a_direct_read_is_refused_a_plain_one_follows_and_it_is_said_once(
    tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    """The system refuses direct reads to memory that is not aligned, as some file systems refuse all of them."""
    entry = write(tmp_path, sizes=(2 * CHUNK,)).entries["t00"]
    memory = memoryview(mmap.mmap(-1, 3 * CHUNK))[1:]
    for _ in range(2):
        settle(entry.file)
        with WeightFile(entry.file, entry.stamp) as file:
            if file.way is not ReadMethod.DIRECT:
                pytest.skip("this file system refuses direct reads")
            file.read_into(memory, 0, entry.stamp.size)
            assert str(file.way) == ReadMethod.PLAIN
    assert bytes(memory[: entry.stamp.size]) == entry.file.read_bytes()
    said = [record.getMessage() for record in warnings.records]
    assert len(said) == 1
    assert "direct reads are refused there (Invalid argument); reading through the page cache" in said[0]


@pytest.fixture
def ramfs(tmp_path: Path) -> Iterator[Path]:
    """A file system without direct reads."""
    folder = tmp_path / "ramfs"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "ramfs", "ramfs", str(folder)], check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_file_system_without_direct_reads(ramfs: Path) -> None:
    entries = list(write(ramfs, sizes=SIZES).entries.values())
    with ReadAhead(entries, CPU) as ahead:
        assert ReadMethod.DIRECT not in ahead.ways.values()
        for entry in entries:
            assert as_bytes(ahead.take(entry.name)) == raw(entry)


# -- files that fail


def stopped_after_the_first(checkpoint: Checkpoint) -> ReadAhead:
    """One tensor is there, the others are not begun: the window has room for nothing else."""
    entries = list(checkpoint.entries.values())
    ahead = ReadAhead(entries, CPU, reads=DiskReads(1, CHUNK), ahead=1)
    ahead.__enter__()
    with ahead._arrived:
        assert ahead._arrived.wait_for(lambda: ahead._pending["t00"].left == 0, timeout=10)
    return ahead


def taken(ahead: ReadAhead) -> None:
    try:
        for name in list(ahead._pending):
            ahead.take(name)
    finally:
        ahead.__exit__(None, None, None)
        assert not any(thread.is_alive() for thread in ahead._threads)


def test_a_file_that_is_cut_off_while_it_is_read(tmp_path: Path) -> None:
    ahead = stopped_after_the_first(write(tmp_path, sizes=(SMALL, SMALL, SMALL)))
    os.truncate(tmp_path / "model.safetensors", SMALL + 5000)
    with pytest.raises(FileChanged, match=r"model\.safetensors ends at byte \d+, before byte \d+ .*Tensor 't01' was"):
        taken(ahead)


def test_a_file_that_is_written_while_it_is_read(tmp_path: Path) -> None:
    ahead = stopped_after_the_first(write(tmp_path, sizes=(SMALL, SMALL, SMALL)))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(FileChanged, match=r"model\.safetensors changed while it was read; .*Tensor 't01' was being"):
        taken(ahead)


def test_a_file_that_is_replaced_or_removed_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, sizes=(SMALL, SMALL, SMALL))
    wanted = raw(checkpoint.entries["t02"])
    ahead = stopped_after_the_first(checkpoint)
    (tmp_path / "model.safetensors").unlink()
    assert as_bytes(ahead.take("t02")) == wanted
    taken(ahead)


@pytest.mark.parametrize("replace_by", ["shorter", "other bytes", "another file", "nothing"])
def test_a_file_that_changed_after_its_header_was_read(replace_by: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path, sizes=(SMALL, CHUNK))
    path = tmp_path / "model.safetensors"
    if replace_by == "shorter":
        os.truncate(path, 1000)
    elif replace_by == "other bytes":
        os.utime(path, ns=(0, 0))
    elif replace_by == "another file":
        (tmp_path / "new").write_bytes(path.read_bytes())
        os.replace(tmp_path / "new", path)
    else:
        path.unlink()
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors(: tensor 't00' cannot be read| changed while)"):
        checkpoint.read("t00", CPU)


def test_a_read_error_names_file_and_tensor() -> None:
    """The first page of a process's memory is mapped by nobody: reading it is a real EIO."""
    path = Path("/proc/self/mem")
    entry = TensorEntry(path, "x.weight", "U8", (100,), 0, 100, 0, Stamp.of(path.stat()))
    said = r"/proc/self/mem: tensor 'x\.weight' cannot be read: Input/output error"
    with ReadAhead([entry], CPU) as ahead, pytest.raises(BadCheckpoint, match=said):
        ahead.take("x.weight")


def test_an_error_ends_every_thread_and_is_told_to_each_who_asks(tmp_path: Path) -> None:
    entries = list(write(tmp_path, sizes=(CHUNK,) * 4).entries.values())
    os.truncate(entries[0].file, 2 * CHUNK)
    broken = [replace(entry, stamp=Stamp.of(entry.file.stat())) for entry in entries]
    with ReadAhead(broken, CPU, reads=DiskReads(4, CHUNK)) as ahead:
        for name in ("t03", "t02"):
            with pytest.raises(BadCheckpoint, match="was cut off while it was read"):
                ahead.take(name)
    assert not any(thread.is_alive() for thread in ahead._threads)


def test_leaving_early_ends_every_thread(tmp_path: Path) -> None:
    entries = list(write(tmp_path, sizes=(CHUNK,) * 4).entries.values())
    before = threading.active_count()
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt), ReadAhead(entries, CPU, reads=DiskReads(4, CHUNK), ahead=1):
        raise KeyboardInterrupt
    assert threading.active_count() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


KILLED = """
import sys
from microscale.engine.loading.load import load
from microscale.engine.config import EngineConfig
from microscale.engine.loading.prepare import prepare
print("begins", flush=True)
load(prepare(EngineConfig(sys.argv[1], device="cpu")), lambda done, total: print(done, flush=True))
"""


def test_a_kill_while_loading_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_random_checkpoint("gpt-oss-tiny", folder, {})
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        assert process.stdout.readline().strip().isdigit()
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not list(temporary.iterdir())
    temporary.rmdir()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


# -- NaN


def test_nan_is_heard_of_together_and_none_is_lost(tmp_path: Path) -> None:
    """As on a GPU: the host hears of four tensors at a time, and of the last ones at the end."""
    entries = list(write(tmp_path, sizes=(64,) * 6, dtype="BF16").entries.values())
    good, bad = torch.ones(32, dtype=torch.bfloat16), torch.full((32,), torch.nan, dtype=torch.bfloat16)
    for place in range(6):
        check = NanCheck(together=4)
        looked_at = [bad if number == place else good for number in range(6)]
        with pytest.raises(BadCheckpoint, match=f"model.safetensors: tensor 't0{place}' contains NaN or infinity"):
            look_at_all(check, entries, looked_at)


def look_at_all(check: NanCheck, entries: list[TensorEntry], tensors: list[torch.Tensor]) -> None:
    for entry, tensor in zip(entries, tensors, strict=True):
        check.look(entry, tensor)
    check.settle()


def test_a_load_that_read_nan_does_not_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nan_check.TOGETHER, "cpu", 1000)
    checkpoint = write(tmp_path, sizes=(64,) * 3, dtype="BF16")
    path, last = tmp_path / "model.safetensors", checkpoint.entries["t02"]
    data = bytearray(path.read_bytes())
    data[last.file_begin : last.file_begin + 2] = b"\xc0\x7f"
    path.write_bytes(data)
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(BadCheckpoint, match="tensor 't02' contains NaN"):
        read_all(checkpoint)


def read_all(checkpoint: Checkpoint) -> None:
    with checkpoint.reading(list(checkpoint.entries), CPU):
        for name in checkpoint.entries:
            checkpoint.read(name, CPU)


# -- random checkpoints


def test_a_random_checkpoint_is_one_that_loads(tmp_path: Path) -> None:
    total = write_random_checkpoint("gpt-oss-tiny", tmp_path / "tiny", {"num_hidden_layers": 2})
    weights = open_weights(str(tmp_path / "tiny"))
    assert weights.config.num_layers == 2
    heard: list[tuple[int, int]] = []
    with weights.reading(CPU, lambda done, all_bytes: heard.append((done, all_bytes))):
        weights.embed("cpu")
        for layer in range(2):
            weights.layer(layer, "cpu")
        weights.norm("cpu")
        weights.lm_head("cpu")
    assert heard[0] == (0, total)
    assert heard[-1] == (total, total)
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)


def test_a_window_is_stated_for_each_device() -> None:
    assert set(read_ahead.AHEAD) == {"cpu", "cuda"}
