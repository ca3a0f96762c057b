"""CUDA graphs: work on tensors at fixed places that is captured once and replayed, a graph for each key.

A step whose own graph is not captured yet runs in a *stand-in*, the next larger captured graph of its kind. That costs
some ms at most; a capture takes 25 to 50, which all requests would wait for.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from microscale.engine.graph_sizes import FEW_SEQUENCES
from microscale.hardware import Gpu
from microscale.models.recorded import Step

log = logging.getLogger(__name__)
LEAST_GRAPH_MEMORY, GRAPH_SHARE = 2**29, 64
GRAPH_ITSELF = 2**24
"""The most bytes that the driver keeps for a graph: 3 to 6 MiB were seen for 300 kernels. Other processes may take
memory of the GPU during a capture, so more than that is counted only where torch has reserved it."""
PLENTY = 2**32
"""Bytes free on the device. With less, torch's cache is emptied before a capture, which waits for the device: during
a capture nothing can be freed."""
MAX_PADDING, SMALL = 4, 64
"""A stand-in has at most 4 times a step's tokens, or 64. Above, launching the kernels one by one is faster."""

Result = TypeVar("Result")
Kind: TypeAlias = tuple[bool, str]


class GraphCounts(NamedTuple):
    """Since "ready", apart from ``captured``."""

    captured: int
    waited_for: int
    """Steps that no captured graph could hold: their graph was captured first, or their kernels launched one by one."""
    stand_ins: int
    """Steps that ran in a larger graph than their own. A prompt's body and tail count separately."""


@cache
def _capture_stream(index: int) -> torch.cuda.Stream:
    """One stream of a device for all captures: cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream(index)


def graph_memory(gpu: Gpu) -> int:
    """Bytes that captured graphs may take on a card, besides what steps compute in. One of gpt-oss-20b takes about
    5 MiB, and a server that has seen everything has some 300."""
    return max(LEAST_GRAPH_MEMORY, gpu.memory_bytes // GRAPH_SHARE)


def kind_of(key: Step) -> Kind:
    """Keys of one kind can stand in for each other. A prompt alone is a kind of its own: it gives the same bits
    wherever the same kernels run, but not in company."""
    if key.rows is None:
        return key.verify, "all rows"
    if key.rows:
        return key.verify, "tail"
    return key.verify, "alone" if key.sequences <= FEW_SEQUENCES[0] else "body"


def cost(key: Step) -> tuple[int, int, int]:
    """Orders the keys of a kind. Wide tables come last, since other kernels run there. Sequences without tokens are
    programs that end at once, so they cost less than any token."""
    return key.pages, key.tokens, key.sequences


def holds(key: Step, counts: Sequence[int], pages: int) -> bool:
    """Whether sequences with these numbers of tokens fit into a key, with the padding sequences that fill it up."""
    spare = key.tokens - sum(counts)
    if spare < 0 or pages > key.pages or max(counts) > key.longest:
        return False
    return len(counts) + -(-spare // key.longest) <= key.sequences


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    result: Any


class _Bytes:
    """Memory as torch reads that of other libraries: without keeping it."""

    def __init__(self, memory: torch.UntypedStorage) -> None:
        self.__cuda_array_interface__ = {
            "data": (memory.data_ptr(), False), "shape": (memory.nbytes(),), "typestr": "|u1", "version": 2,
        }  # fmt: skip


def _lent(result: Any) -> Any:
    """The same tensors, whose memory the pool may give to the next capture: 512 rows of gpt-oss's logits are 412 MB,
    and would stay with each graph. A result lasts until the next run, so graphs may share it."""
    if isinstance(result, torch.Tensor):
        if not result.is_cuda or torch.cuda.get_allocator_backend() != "native":  # others unmap what is freed
            return result
        memory = torch.as_tensor(_Bytes(result.untyped_storage()), device=result.device).view(result.dtype)
        return memory.as_strided(result.shape, result.stride(), result.storage_offset())
    if is_dataclass(result) and not isinstance(result, type):
        return replace(result, **{field.name: _lent(getattr(result, field.name)) for field in fields(result)})
    return result


class Graphs:
    """The captured graphs, all in one pool of memory."""

    def __init__(
        self,
        device: torch.device,
        uncapturable: Callable[[int], str | None],
        *,
        enabled: bool,
        waits: bool = True,
        budget: int = LEAST_GRAPH_MEMORY,
    ) -> None:
        """``uncapturable``: why work on a number of tokens cannot be captured, if it cannot. ``waits``: for the device
        before each capture, as threads need that watch work on it (NCCL's). ``budget``: see ``graph_memory``."""
        self.enabled = enabled and device.type == "cuda"
        if self.enabled and torch.cuda.is_available():
            with torch.cuda.device(device):
                torch.cuda.current_blas_handle()  # cuBLAS is not set up within a capture
        self._uncapturable = uncapturable
        self._waits = waits
        self._logged: set[str] = set()
        self._ran: set[Kind] = set()
        """Kinds whose work was launched once. The first run makes what is kept between runs."""
        self._graphs: dict[Step, _Graph | None] = {}
        """``None``: this rank could not capture it. All ranks must run a step in the same size, so the key counts as
        captured there too."""
        self._sorted: defaultdict[Kind, list[Step]] = defaultdict(list)
        self.stand_in = False
        """Steps without a graph run in a stand-in. Otherwise their own graph is captured when they come up: in
        benchmarks of steps, and wherever graphs must give the bits of single launches."""
        self.missed: Counter[Step] = Counter()
        """Steps that ran without their own graph."""
        self.first_runs = 0
        """Runs that were slow because they were the first of their kind, or captured, or had no graph of their own."""
        self.waited_for = 0
        self.stand_ins = 0
        self._memory: Any = None
        self._bytes = 0
        self._budget = budget
        self._failed = False
        """The driver refused a capture: what is captured stays, and nothing is added."""

    def __len__(self) -> int:
        return sum(1 for graph in self._graphs.values() if graph is not None)

    def __contains__(self, key: Step) -> bool:
        return key in self._graphs

    @property
    def is_full(self) -> bool:
        """No more can be captured. Several ranks go on together: all must know the same keys."""
        return self._is_closed and not self._waits

    @property
    def _is_closed(self) -> bool:
        return self._failed or self._bytes > self._budget

    def pick(self, wanted: Step, counts: Sequence[int]) -> Step:
        """The key that a step of sequences with so many tokens runs in: its own, or that of a stand-in."""
        if not self.stand_in or not self.enabled or wanted in self._graphs:
            return wanted
        if self._uncapturable(wanted.tokens) is not None:
            return wanted
        self.missed[wanted] += 1
        self.first_runs += 1
        most = max(MAX_PADDING * wanted.tokens, SMALL)
        for key in self._sorted[kind_of(wanted)]:
            if key.tokens <= most and holds(key, counts, wanted.pages):
                self.stand_ins += 1
                return key
        self.waited_for += 1
        return wanted

    def run(self, key: Step, work: Callable[[], Result]) -> Result:
        """What ``work`` gives: from its graph if there is one. The result lasts until the next run."""
        graph = self._graphs.get(key)
        if graph is None and self.enabled:
            if not self.has_run(key):
                self._ran.add(kind_of(key))
                self.first_runs += 1
            elif not self.stand_in and self.capture(key, work):
                self.waited_for += 1
                graph = self._graphs[key]
        if graph is not None:
            graph.graph.replay()
            return graph.result  # type: ignore[no-any-return]
        with torch.inference_mode():
            return work()

    def has_run(self, key: Step) -> bool:
        """Whether work of this kind was launched before."""
        return kind_of(key) in self._ran

    def capture(self, key: Step, work: Callable[[], object]) -> bool:
        """Capture the work of a key. Whether there is a graph of it now. Nothing is computed, so the tensors may hold
        anything."""
        if key not in self._graphs and self._can_capture(key):
            self.first_runs += 1
            graph = None if self._is_closed else self._record(work)
            if graph is not None or self._waits:
                self._graphs[key] = graph
                insort(self._sorted[kind_of(key)], key, key=cost)
        return self._graphs.get(key) is not None

    def _can_capture(self, key: Step) -> bool:
        """Whether a graph can hold a step of this size; logs once why not."""
        if not self.enabled:
            return False
        reason = self._uncapturable(key.tokens)
        if reason is not None:
            self._log_once(f"Steps of {key.tokens} tokens run without a CUDA graph: {reason}.")
        elif self._bytes > self._budget:
            self._log_once(f"{len(self)} graphs take {self._bytes >> 20} MiB, and no more are captured.")
        return reason is None

    def _log_once(self, sentence: str) -> None:
        if sentence not in self._logged:
            self._logged.add(sentence)
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

    def _record(self, work: Callable[[], object]) -> _Graph | None:
        """``None`` if the driver refuses. Then no more are captured, and steps of other sizes are launched."""
        try:
            with self._recording() as graph, torch.inference_mode():
                result = _lent(work())
        except RuntimeError as error:  # torch's, for any error of the driver
            self._failed = True
            log.warning(
                "A CUDA graph cannot be captured, and no more are: steps of sizes that have not come up are slower. %s",
                str(error).partition("\n")[0],
            )
            return None
        return _Graph(graph, result)
