"""CUDA graphs: work on standing tensors that is captured once and replayed.

The work of a key is one graph, or a row of them that are replayed one after the other: a capture can be left between
two layers and taken up again later (``Parted``). What the layers hand on stays where it is in the graphs' memory
meanwhile. Each seam costs a replay one launch on the host, about 5 us, and the overlap of two kernels on the GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from microscale.hardware import Gpu
from microscale.models.decoder import Parted, run_through
from microscale.models.recorded import SHORT_CONTEXT

log = logging.getLogger(__name__)
EVERY_SIZE_TO = 64
LEAST_GRAPH_MEMORY, GRAPH_SHARE = 2**29, 64
GRAPH_ITSELF = 2**24
"""Bytes that the driver keeps of a graph, at most: 3 to 6 MiB were seen for 300 kernels. Other processes on the GPU may
take memory during a capture, so more than that is counted only where torch has reserved it."""
PART_LAYERS = 8
"""Of a graph that is captured between steps: 5 to 8 ms on an H200's host. gpt-oss-20b is three of them, 120b five."""
MOST_PARTS = 8
"""A capture that was left more often begins anew."""
PLENTY = 2**32
"""Bytes free on the device. With less, what steps have left in torch's cache is freed before a capture, which waits for
the device: within a capture nothing can be freed."""

Result = TypeVar("Result")
AnyKey = TypeVar("AnyKey", bound=Hashable)
Task: TypeAlias = tuple[int, Callable[[], Parted[Result]]]
"""Of a key: the number of its tokens, and its work."""


class GraphCounts(NamedTuple):
    """Since the start, but for what was captured before it was over."""

    captured: int
    waited_for: int
    """Captures that a step had to wait for."""
    stand_ins: int
    """Steps that ran in a larger graph than their own."""


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
        self._tried: dict[Hashable, None] = {}
        """Keys that were captured, or would have been if there were memory and the driver did not refuse: the same on
        all ranks."""
        self._graphs: dict[Hashable, _Capture] = {}
        self._begun: dict[Hashable, _Capture] = {}
        """Captures that were left."""
        self.first_runs = 0
        """Runs so far that came first of their kind, or captured, or ran in a stand-in, and captures between others: up
        to 50 ms on an H200, and never again."""
        self.waited_for = 0
        """Graphs that were captured when they were wanted."""
        self._memory: Any = None
        self._failed = False
        """The driver refused a capture: what is captured goes on, and nothing is added."""
        self._bytes = 0
        self._budget = budget

    def __len__(self) -> int:
        """Keys whose work is captured."""
        return len(self._graphs)

    def run(self, key: Hashable, tokens: int, work: Callable[[], Parted[Result]]) -> Result:
        """What ``work`` gives. It computes on standing tensors, on ``tokens`` tokens, and is the same for one key. What
        it gives lasts until the next run.

        A key that comes up is captured at once: that takes the host hardly longer than to launch its kernels.
        """
        found = self._graphs.get(key)
        if found is not None:
            found.replay()
            return found.result  # type: ignore[no-any-return]
        if type(key) not in self._ran or not self._can_capture(key, tokens):
            with torch.inference_mode():
                result = run_through(work())
            self.first_runs += type(key) not in self._ran
            self._ran.add(type(key))
            return result
        self.first_runs += 1
        self.waited_for += 1
        capture = self._begun.get(key) or _Capture(work())
        capture.replay()
        if not self._record(key, capture, _never):
            return self.run(key, tokens, work)  # from its first layer: what has run is only computed again
        capture.parts[-1].replay()
        return capture.result  # type: ignore[no-any-return]

    def capture(
        self, key: Hashable, tokens: int, work: Callable[[], Parted[object]], is_over: Callable[[], bool]
    ) -> bool:
        """Go on with the capture of a key before anybody wants it, until ``is_over`` behind a layer. Whether there is
        nothing left to capture. Nothing is run, and the standing tensors may hold anything."""
        if key in self._graphs or not self._can_capture(key, tokens):
            return True
        capture = self._begun.get(key)
        if capture is None or len(capture.parts) >= MOST_PARTS:
            capture = _Capture(work())
        self.first_runs += 1
        return not self._record(key, capture, _never if self._waits else is_over) or capture.done

    def has_run(self, key: Hashable) -> bool:
        """Whether the work of such a key has run as it is."""
        return type(key) in self._ran

    def sizes(self, kind: type[AnyKey]) -> list[AnyKey]:
        """Captured keys of a kind. Of several ranks, whose steps must have the same size, those that each has tried:
        where one could not be captured, it runs as it is."""
        return [key for key in self._known if isinstance(key, kind)]

    def __contains__(self, key: Hashable) -> bool:
        """Whether it is one of ``sizes``."""
        return key in self._known

    @property
    def _known(self) -> Collection[Hashable]:
        return self._tried if self._waits else self._graphs

    def _can_capture(self, key: Hashable, tokens: int) -> bool:
        """Whether everything in a step can be captured; tells once why not."""
        if not self.enabled:
            return False
        reason = self._uncapturable(tokens)
        if reason is not None:
            self._tell(f"Steps of {tokens} tokens run without a CUDA graph: {reason}.")
            return False
        self._tried[key] = None
        if self._bytes > self._budget:
            self._tell(f"{len(self._graphs)} graphs take {self._bytes >> 20} MiB, and no more are captured.")
            return False
        return not self._failed

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            log.info(sentence)

    @contextmanager
    def _recording(self) -> Iterator[torch.cuda.CUDAGraph]:
        """A graph of what is launched inside. The first time as torch does it, which waits for the device, and frees
        what loading has left on it and on the host. Later ones need not wait: the device runs what was captured before,
        while the host records the next."""
        free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
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
        taken, of_torch = free - torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved() - reserved
        self._bytes += max(0, min(taken, max(0, of_torch) + GRAPH_ITSELF))

    def _record(self, key: Hashable, capture: _Capture, is_over: Callable[[], bool]) -> bool:
        """One more graph of a capture, up to its end or to where it ``is_over``. Whether it went well; if not, no more
        are captured, and steps of other sizes run as they are."""
        self._begun.pop(key, None)
        try:
            with self._recording() as graph, torch.inference_mode():
                try:
                    while True:
                        next(capture.work)
                        if is_over():
                            break
                except StopIteration as end:
                    capture.done, capture.result = True, end.value
        except RuntimeError as error:  # torch's, of the driver's own
            self._failed = True
            log.warning(
                "A CUDA graph cannot be captured, and no more are: steps of sizes that have not come up are slower. %s",
                str(error).partition("\n")[0],
            )
            return False
        capture.parts.append(graph)
        (self._graphs if capture.done else self._begun)[key] = capture
        return True


def _never() -> bool:
    return False
