"""How benchmarks time, and the two ceilings that they are held against. Needs a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

GIB = 1 << 30


def graph_us(
    work: Callable[[], object],
    repeats: int = 20,
    warm_up: int = 3,
    pick: Callable[[Sequence[float]], float] = statistics.median,
) -> float:
    """Microseconds of one replay of ``work`` captured as a CUDA graph: the median, or what ``pick`` says."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # compiles, outside of the capture
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for turn in range(warm_up + repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if turn >= warm_up:
            times.append(float(start.elapsed_time(end)) * 1e3)
    return pick(times)


@dataclass(frozen=True)
class Ceilings:
    """What this very card reaches today: reading memory, and a large bf16 matrix product on random data."""

    read_gbs: float
    bf16_tflops: float

    def floor_us(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / (self.read_gbs * 1e3), flops / (self.bf16_tflops * 1e6))


def measure_ceilings(read_bytes: int = 2 * GIB, size: int = 8192) -> Ceilings:
    """The best of many tries: medians of the same reading on one H200 were 4.4 and 3.9 TB/s within a minute."""
    # A maximum reads everything once and writes next to nothing.
    read = graph_us(torch.empty(read_bytes // 4, dtype=torch.int32, device="cuda").random_().amax, pick=min)
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = graph_us(lambda: a @ b, pick=min)
    return Ceilings(read_bytes / read / 1e3, 2 * size**3 / product / 1e6)
