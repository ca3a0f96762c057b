"""``microscale bench load``: how fast a checkpoint loads, next to a raw read of the same files.

Rows: ``raw`` reads the files as ``dd iflag=direct`` does, one read after the other. Three rows for each ``DiskReads``,
such as ``2 x 8 MiB``: ``in flight`` reads the files like that, each thread into one place; ``buffers`` is the loader's
reading, into its buffers and no further; ``tensors`` brings every tensor to the device and drops it. ``load`` is all of
a load, packing included. Before each of them the files are dropped from the page cache. What is read is compared with
the files first.
"""

from __future__ import annotations

import gc
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import Prepared
from microscale.errors import BadSetting
from microscale.hardware import GIB
from microscale.models.checkpoint import FromCheckpoint
from microscale.models.reading.chunks import READS, DiskReads, ReadChunk
from microscale.models.reading.file import WeightFile, resident_bytes
from microscale.models.reading.targets import Buffer, Landing, Targets, targets_on
from microscale.models.safetensors_header import TensorEntry
from microscale_lab.kernel_bench.rows import WrongResult

RAW_BLOCK = 16 << 20
CHECKED = 16
"""Tensors whose bytes are compared before anything is timed."""


@dataclass(frozen=True)
class LoadRow:
    """One way to read the checkpoint: medians, and the most memory of all runs."""

    what: str
    seconds: float
    gbs: float
    share_of_raw: float
    """Of the row ``raw``."""
    peak_resident: int
    """Bytes of this process, at the most."""
    page_cache_growth: int
    """Bytes of these files that the page cache held afterwards and did not before."""


@dataclass(frozen=True)
class LoadResult:
    """All rows, and what their memory is to be held against."""

    num_bytes: int
    """Of the files."""
    resident_before: int
    weights_on_host: int
    """What the model's weights take of this process by themselves."""
    rows: tuple[LoadRow, ...]

    @property
    def beside_weights(self) -> int:
        """Peak memory of a load in this process, without the weights that stay in it."""
        return self.rows[-1].peak_resident - self.weights_on_host


class OnlyBuffers:
    """Tensors that arrive nowhere: what is read stays in the buffers of the device's loads."""

    def __init__(self, device: torch.device) -> None:
        self._buffers_of: Targets = targets_on(device)

    def reads_in_place(self, entry: TensorEntry) -> bool:
        return False

    def land(self, entry: TensorEntry) -> Landing:
        return Landing(entry, torch.empty(entry.num_bytes, dtype=torch.uint8, device="meta"))

    def buffer_memory(self, num_bytes: int) -> torch.Tensor:
        return self._buffers_of.buffer_memory(num_bytes)

    def copy(self, chunk: ReadChunk, source: torch.Tensor, buffer: Buffer, landings: dict[str, Landing]) -> None:
        pass

    def mark(self) -> object:
        return None

    def take(self, mark: object) -> None:
        pass

    def close(self) -> None:
        self._buffers_of.close()


def run(prepared: Prepared, repeats: int, ways_to_read: Sequence[DiskReads] = ()) -> LoadResult:
    """Measure; ``BadSetting`` for a model without files. ``ways_to_read``: a load's own without."""
    weights = prepared.weights
    if not isinstance(weights, FromCheckpoint):
        raise BadSetting(f"{prepared.options.model} has no files to read; name a checkpoint, or write one with --make.")
    entries = list(weights.entries)
    files = sorted({entry.file for entry in entries})
    _check(weights, entries, prepared.device)
    num_bytes = sum(file.stat().st_size for file in files)

    def whole_load() -> None:
        load(prepared)
        _finish(prepared.device)

    def tensors(reads: DiskReads) -> None:
        weights.read_through(prepared.device, reads)
        _finish(prepared.device)

    def buffers(reads: DiskReads) -> None:
        weights.read_through(prepared.device, reads, OnlyBuffers(prepared.device))

    ways: dict[str, Callable[[], None]] = {"raw": lambda: _read_raw(files, DiskReads(1, RAW_BLOCK))}
    for reads in ways_to_read or (READS[prepared.device.type],):
        ways[f"in flight {reads}"] = partial(_read_raw, files, reads)
        ways[f"buffers {reads}"] = partial(buffers, reads)
        ways[f"tensors {reads}"] = partial(tensors, reads)
    ways["load"] = whole_load
    before = _resident()
    seconds: dict[str, list[float]] = {what: [] for what in ways}
    memory = dict.fromkeys(ways, (0, 0))
    # One after the other and not row by row: a disk that others use is as slow for all of them.
    for _ in range(repeats):
        for what, way in ways.items():
            taken, peak, growth = _measure(way, files)
            seconds[what].append(taken)
            memory[what] = (max(peak, memory[what][0]), max(growth, memory[what][1]))
    medians = {what: statistics.median(times) for what, times in seconds.items()}
    rows = (
        LoadRow(what, taken, num_bytes / taken / 1e9, medians["raw"] / taken, *memory[what])
        for what, taken in medians.items()
    )
    on_host = sum(prepared.memory.weights.values()) if prepared.device.type == "cpu" else 0
    return LoadResult(num_bytes, before, on_host, tuple(rows))


def table(result: LoadResult) -> str:
    lines = [f"{'':22} {'seconds':>8} {'GB/s':>6} {'of raw':>7} {'resident GiB':>13} {'page cache + GiB':>17}"]
    lines += [
        f"{row.what:22} {row.seconds:8.2f} {row.gbs:6.2f} {100 * row.share_of_raw:6.0f}% "
        f"{row.peak_resident / GIB:13.2f} {row.page_cache_growth / GIB:17.2f}"
        for row in result.rows
    ]
    extra = f"{result.beside_weights / GIB:.2f} GiB resident without the weights"
    return "\n".join([*lines, f"{result.num_bytes / 1e9:.2f} GB of files; peak {extra}."])


def as_json(result: LoadResult) -> dict[str, object]:
    return asdict(result) | {"beside_weights": result.beside_weights}


def _check(weights: FromCheckpoint, entries: Sequence[TensorEntry], device: torch.device) -> None:
    """Tensors from all over the files are what the files hold."""
    for entry in entries[:: max(1, len(entries) // CHECKED)]:
        found = weights.read_one(entry.name, device).flatten().view(torch.uint8).cpu().numpy().tobytes()
        with entry.file.open("rb") as file:
            file.seek(entry.file_begin)
            if file.read(entry.num_bytes) != found:
                raise WrongResult(f"{entry.file}: tensor {entry.name!r} was not read as it is there.")


def _measure(way: Callable[[], None], files: Sequence[Path]) -> tuple[float, int, int]:
    """Seconds, the process's peak, and growth of the page cache, from a cold one."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = _cached(files)
    with _peak() as peak:
        begun = time.perf_counter()
        way()
        taken = time.perf_counter() - begun
    return taken, peak[0], _cached(files) - before


def _cached(files: Sequence[Path]) -> int:
    total = 0
    for file in files:
        with file.open("rb") as opened:
            total += resident_bytes(opened.fileno()) or 0
    return total


def _read_raw(files: Sequence[Path], reads: DiskReads) -> None:
    """All files with direct reads, in their order, each thread into one place."""
    block = reads.num_bytes
    places = iter([(file, at) for file in files for at in range(0, file.stat().st_size, block)])
    lock = threading.Lock()
    opened = {file: WeightFile.cold(file) for file in files}

    def work() -> None:
        memory = memoryview(mmap.mmap(-1, block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        while True:
            with lock:
                place = next(places, None)
            if place is None:
                return
            file, at = place
            opened[file].read_into(memory, at, min(at + block, opened[file].size))

    workers = [threading.Thread(target=work) for _ in range(reads.in_flight)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for raw in opened.values():
        raw.close()


def _finish(device: torch.device) -> None:
    """Wait for the device, and give back what the last run held."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _resident() -> int:
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@contextmanager
def _peak() -> Iterator[list[int]]:
    """The most memory of the process meanwhile, looked at every few ms: its own counter cannot be reset everywhere."""
    peak, ended = [_resident()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            peak[0] = max(peak[0], _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()
