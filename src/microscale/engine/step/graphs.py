"""CUDA graphs: work on standing tensors that is captured once and replayed.

The work of a key is one graph, or a row of them that are replayed one after the other: a capture can be left between
two layers and taken up again later (``Parted``). What the layers hand on stays where it is in the graphs' memory
meanwhile. Each seam costs a replay one launch on the host, about 5 us, and the overlap of two kernels on the GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias, TypeVar

import torch

from microscale.hardware import Gpu
from microscale.models.decoder import Parted, run_through
from microscale.models.recorded import SHORT_CONTEXT

log = logging.getLogger(__name__)
EVERY_SIZE_TO = 64
LEAST_GRAPH_MEMORY, GRAPH_SHARE = 2**29, 64
PART_LAYERS = 8
"""Of a graph in parts: 5 to 8 ms of a capture by an H200's host. gpt-oss-20b is three of them, 120b five."""
MOST_PARTS = 8
"""A capture that was left more often begins anew."""
PLENTY = 2**32
"""Bytes free on the device. With less, what steps have left in torch's cache is freed before a capture, which waits for
the device: within a capture nothing can be freed."""

Result = TypeVar("Result")
Task: TypeAlias = tuple[int, Callable[[], Parted[Result]]]
"""Of a key: the number of its tokens, and its work."""


def graph_size(rows: int) -> int:
    """The batch that ``rows`` sequences run in: their own number up to 64, then one of 16 sizes between powers of two,
    which is at most a sixteenth more."""
    if rows <= EVERY_SIZE_TO:
        return rows
    step = 1 << ((rows - 1).bit_length() - 5)
    return -(-rows // step) * step


def table_width(longest: int, page_size: int, max_pages: int) -> int:
    """Pages of a table whose sequences have up to ``longest`` tokens: one of two widths.

    Kernels learn from it how long a sequence may be. Up to the narrow one attention adds up its splits in the same
    launch, however long a sequence may become.
    """
    short = min(SHORT_CONTEXT // page_size, max_pages)
    return short if longest <= short * page_size else max_pages


@cache
def _capture_stream(index: int) -> torch.cuda.Stream:
    """Of a device, one for all captures: cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream(index)


def graph_memory(gpu: Gpu) -> int:
    """Bytes that captured graphs may take on a card, beside what steps compute in: then no more are captured. One of
    gpt-oss-20b takes about 5 MiB, and a server that has seen everything wants some 300."""
    return max(LEAST_GRAPH_MEMORY, gpu.memory_bytes // GRAPH_SHARE)


def whole(work: Callable[[], Result]) -> Callable[[], Parted[Result]]:
    """Work that cannot be left before it is done."""

    def parted() -> Parted[Result]:
        yield from ()
        return work()

    return parted


def after_layers(count: int) -> Callable[[], bool]:
    """For ``Graphs.capture``: whether so many layers were captured since."""
    left = count

    def is_over() -> bool:
        nonlocal left
        left -= 1
        return left <= 0

    return is_over


@dataclass
class _Capture:
    """The graphs of one key, and what is left to capture."""

    work: Parted[object]
    parts: list[torch.cuda.CUDAGraph] = field(default_factory=list)
    done: bool = False
    result: Any = None

    def replay(self) -> None:
        for part in self.parts:
            part.replay()


class Graphs:
    """One captured graph for each key that has come up, or a row of them, all in one pool of memory."""

    def __init__(
        self,
        device: torch.device,
        uncapturable: Callable[[int], str | None],
        *,
        enabled: bool,
        waits: bool = True,
        budget: int = LEAST_GRAPH_MEMORY,
    ) -> None:
        """``uncapturable``: why work on so many tokens cannot be captured, if it cannot. It then runs as it is.
        ``waits``: for the device before each capture, as other threads need that look after work on it (NCCL's).
        ``budget``: see ``graph_memory``."""
        self.enabled = enabled and device.type == "cuda"
        if self.enabled and torch.cuda.is_available():
            with torch.cuda.device(device):
                torch.cuda.current_blas_handle()  # cuBLAS is not set up within a capture
        self._uncapturable = uncapturable
        self._waits = waits
        self._told: set[str] = set()
        self._ran: set[type] = set()
        """Kinds of key whose work has run as it is. The first run makes what is kept between runs."""
        self._graphs: dict[Hashable, _Capture] = {}
        self._begun: dict[Hashable, _Capture] = {}
        """Captures that were left."""
        self.first_runs = 0
        """Runs so far that came first of their kind, or captured, and captures beside others: 5 to 50 ms on an H200,
        and never again."""
        self.waited_for = 0
        """Graphs that were captured when they were wanted."""
        self._memory: Any = None
        self._bytes = 0
        self._budget = budget

    def __len__(self) -> int:
        """Keys whose work is captured."""
        return len(self._graphs)

    def run(self, key: Hashable, tokens: int, work: Callable[[], Parted[Result]], *, in_parts: bool = False) -> Result:
        """What ``work`` gives. It computes on standing tensors, on ``tokens`` tokens, and is the same for one key. What
        it gives lasts until the next run.

        A key that comes up is captured at once: that takes the host hardly longer than to launch its kernels.
        ``in_parts``: for work that takes the device long. It begins when the first layers are captured.
        """
        found = self._graphs.get(key)
        if found is not None:
            found.replay()
            return found.result  # type: ignore[no-any-return]
        if type(key) not in self._ran or not self.can_capture(tokens):
            with torch.inference_mode():
                result = run_through(work())
            self.first_runs += type(key) not in self._ran
            self._ran.add(type(key))
            return result
        self.first_runs += 1
        self.waited_for += 1
        capture = self._begun.get(key) or _Capture(work())
        capture.replay()
        while not capture.done:
            self._record(key, capture, after_layers(PART_LAYERS) if in_parts and not self._waits else _never)
            capture.parts[-1].replay()
        return capture.result  # type: ignore[no-any-return]

    def capture(
        self, key: Hashable, tokens: int, work: Callable[[], Parted[object]], is_over: Callable[[], bool]
    ) -> bool:
        """Go on with the capture of a key before anybody wants it, until ``is_over`` behind a layer. Whether there is
        nothing left to capture. Nothing is run, and the standing tensors may hold anything."""
        if key in self._graphs or not self.can_capture(tokens):
            return True
        capture = self._begun.get(key)
        if capture is None or len(capture.parts) >= MOST_PARTS:
            capture = _Capture(work())
        self.first_runs += 1
        self._record(key, capture, _never if self._waits else is_over)
        return capture.done

    def has_run(self, key: Hashable) -> bool:
        """Whether the work of such a key has run as it is."""
        return type(key) in self._ran

    def can_capture_beside(self, key: Hashable) -> bool:
        """Whether a capture of such a key disturbs nothing that the device runs, and needs no run before."""
        return self._memory is not None and not self._waits and self.has_run(key)

    def can_capture(self, tokens: int) -> bool:
        """Whether everything in a step can be captured; tells once why not."""
        if not self.enabled:
            return False
        if self._bytes > self._budget:
            self._tell(f"{len(self._graphs)} graphs take {self._bytes >> 20} MiB, and no more are captured.")
            return False
        reason = self._uncapturable(tokens)
        if reason is not None:
            self._tell(f"Steps of {tokens} tokens run without a CUDA graph: {reason}.")
        return reason is None

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            log.info(sentence)

    @contextmanager
    def _recording(self) -> Iterator[torch.cuda.CUDAGraph]:
        """A graph of what is launched inside. The first time as torch does it, which waits for the device, and frees
        what loading has left on it and on the host. Later ones need not wait: the device runs what was captured before,
        while the host records the next."""
        free, _ = torch.cuda.mem_get_info()
        graph = torch.cuda.CUDAGraph()
        stream = _capture_stream(torch.cuda.current_device())
        if self._waits or self._memory is None:
            with torch.cuda.graph(graph, pool=self._memory, stream=stream):
                yield graph
        else:
            if free < PLENTY:
                torch.cuda.empty_cache()
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self._memory)
                try:
                    yield graph
                finally:
                    graph.capture_end()
        self._memory = graph.pool()
        self._bytes += max(0, free - torch.cuda.mem_get_info()[0])

    def _record(self, key: Hashable, capture: _Capture, is_over: Callable[[], bool]) -> None:
        """One more graph of a capture, up to its end or to where it ``is_over``. If the work fails, it begins anew."""
        self._begun.pop(key, None)
        with self._recording() as graph, torch.inference_mode():
            try:
                while True:
                    next(capture.work)
                    if is_over():
                        break
            except StopIteration as end:
                capture.done, capture.result = True, end.value
        capture.parts.append(graph)
        (self._graphs if capture.done else self._begun)[key] = capture


def _never() -> bool:
    return False
