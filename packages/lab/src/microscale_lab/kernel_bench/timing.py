"""How benchmarks time, and the two ceilings that they are held against. Needs a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from microscale.errors import Unsupported
from microscale.hardware import Gpu, detect

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
    """What this very card reaches today: reading memory, and a large matrix product on random data."""

    read_gbs: float
    bf16_tflops: float
    fp8_tflops: float | None = None
    """``None`` where torch has no fp8 product for this card."""

    def floor_us(self, num_bytes: float, flops: float, unit: str = "bf16") -> float:
        tflops = self.fp8_tflops if unit == "fp8" and self.fp8_tflops else self.bf16_tflops
        return max(num_bytes / (self.read_gbs * 1e3), flops / (tflops * 1e6))


def present_gpu() -> Gpu:
    """This machine's GPU; refuses a machine without one."""
    gpu = detect()
    if gpu.is_cpu:
        raise Unsupported("Kernel benchmarks need a GPU; `microscale prove` checks the kernels without one.")
    return gpu


def measure_ceilings(read_bytes: int = 2 * GIB, size: int = 8192) -> Ceilings:
    """The best of many tries: medians of the same reading on one H200 were 4.4 and 3.9 TB/s within a minute."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * size**3
    # A maximum reads everything once and writes next to nothing.
    read_us = graph_us(torch.empty(read_bytes // 4, dtype=torch.int32, device="cuda").random_().amax, pick=min)
    return Ceilings(
        read_bytes / read_us / 1e3,
        flops / graph_us(lambda: a @ b, pick=min) / 1e6,
        _fp8_tflops(a, b.T.contiguous(), flops),
    )


def _fp8_tflops(a: torch.Tensor, b: torch.Tensor, flops: int) -> float | None:
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")

    def product() -> torch.Tensor:
        return torch._scaled_mm(a8, b8.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    try:
        product()
    except RuntimeError:
        return None
    return flops / graph_us(product, pick=min) / 1e6
