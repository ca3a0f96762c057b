"""CUDA graphs: work on standing tensors that is captured once and replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch

from microscale.hardware import Gpu
from microscale.models.recorded import SHORT_CONTEXT

log = logging.getLogger(__name__)
EVERY_SIZE_TO = 64
LEAST_GRAPH_MEMORY, GRAPH_SHARE = 2**29, 64

Result = TypeVar("Result")


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


class Graphs:
    """One captured graph for each key that has come up, all in one pool of memory."""

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
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self.first_runs = 0
        """Runs so far that came first of their kind, or captured: 20 to 50 ms on an H200, and never again."""
        self._memory: Any = None
        self._bytes = 0
        self._budget = budget

    def run(self, key: Hashable, tokens: int, work: Callable[[], Result]) -> Result:
        """What ``work`` gives. It computes on standing tensors, on ``tokens`` tokens, and is the same for one key. What
        it gives lasts until the next run.

        A key that comes up is captured at once: that takes the host hardly longer than to launch its kernels.
        """
        if key in self._graphs:
            graph, result = self._graphs[key]
            graph.replay()
            return result  # type: ignore[no-any-return]
        if type(key) not in self._ran or not self.can_capture(tokens):
            result = work()
            self.first_runs += type(key) not in self._ran
            self._ran.add(type(key))
            return result
        self.first_runs += 1
        self._capture(key, work)
        return self.run(key, tokens, work)

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
    def _recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """The first time as torch does it, which waits for the device, and frees what loading has left on it and on the
        host. Later ones need not wait: the device replays what was captured before, while the host records the next."""
        stream = _capture_stream(torch.cuda.current_device())
        if self._waits or self._memory is None:
            with torch.cuda.graph(graph, pool=self._memory, stream=stream):
                yield
            return
        torch.cuda.empty_cache()  # within a capture nothing can be freed
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._memory)
            try:
                yield
            finally:
                graph.capture_end()

    def _capture(self, key: Hashable, work: Callable[[], Any]) -> None:
        """Record the work. If that gives way, nothing of it is left."""
        free, _ = torch.cuda.mem_get_info()
        graph = torch.cuda.CUDAGraph()
        with self._recording(graph):
            result = work()
        self._memory = graph.pool()
        self._graphs[key] = (graph, result)
        self._bytes += max(0, free - torch.cuda.mem_get_info()[0])
