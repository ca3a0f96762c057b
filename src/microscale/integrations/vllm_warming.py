"""Compiles the kernels of vLLM's expert layers in parallel while vLLM reads its weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from triton.backends.compiler import GPUTarget

from microscale.hardware import WARP_SIZE, Gpu, system_memory
from microscale.kernels.compiling.job import workers
from microscale.kernels.compiling.warming import Warming
from microscale.models.recorded import token_counts
from microscale.planning.ops import Kernel, Launch, MoeSpec
from microscale.planning.shards import record_moe

SPARE_CORES = 1
_begun: dict[MoeSpec, Warming] = {}


def start_warming(spec: MoeSpec, gpu: Gpu, max_tokens: int) -> None:
    """Start compiling the kernels that the layer may launch in steps of up to ``max_tokens``."""
    device = torch.cuda.current_device()

    def record() -> Mapping[Kernel, Launch]:
        torch.cuda.set_device(device)  # the current device is per thread, and kernels are loaded to it
        return record_moe(spec, gpu, token_counts(max_tokens))

    target = GPUTarget("cuda", gpu.sm, WARP_SIZE)
    _begun[spec] = Warming(record, target, None, workers(system_memory()[1], SPARE_CORES), is_guest=True)
    _begun[spec].start()


def finish_warming(spec: MoeSpec) -> None:
    """Wait for the compilation, the first time."""
    warming = _begun.pop(spec, None)
    if warming is not None:
        warming.finish()
