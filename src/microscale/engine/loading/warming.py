"""Which kernels an engine may launch, made ready while its weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget

from microscale import hardware
from microscale.engine.loading.drafting import PreparedHead
from microscale.engine.loading.prepare import Prepared
from microscale.hardware import WARP_SIZE
from microscale.kernels.compiling.job import workers
from microscale.kernels.compiling.warming import Warming
from microscale.models.config import PAGED
from microscale.models.draft_heads.heads import bind_head_shapes, record_head
from microscale.models.families import ModelConfig
from microscale.models.recorded import MAX_TOKENS, Wanted, bind_shapes, record
from microscale.planning.following import record_following
from microscale.planning.ops import Kernel, Launch, Ops
from microscale.planning.plan import Setup
from microscale.planning.ranks import NoSums

SPARE_CORES = 1
"""For reading and packing the weights."""


def recorded(
    config: ModelConfig,
    setup: Setup,
    page_size: int,
    max_tokens: int = MAX_TOKENS,
    draft_tokens: int = 0,
    head: PreparedHead | None = None,
    wanted: Wanted | None = None,
) -> Mapping[Kernel, Launch]:
    """Every kernel that the model may start on this card, in steps of up to ``max_tokens`` with up to ``draft_tokens``
    drafts of a sequence; and those of its draft head. ``wanted``: what is run, where that is known."""
    ranks = NoSums(config.shard.world)
    ops = Ops(setup.gpu, setup.activations, setup.preference, setup.precision, ranks=ranks)
    kernels = record(bind_shapes(config, ops, page_size), max_tokens, draft_tokens, wanted)
    if draft_tokens:
        kernels |= record_following(len(PAGED))
    if head is not None:
        own = Ops(setup.gpu, setup.activations, setup.preference, head.setup.precision, ranks=ranks)
        kernels |= record_head(bind_head_shapes(head.config, own, page_size), config.max_context, max_tokens)
    return kernels


@contextmanager
def kernels_ready(
    prepared: Prepared,
    kernel_cache: Path | None = None,
    on_kernels: Callable[[int, int], None] = lambda done, total: None,
    wanted: Wanted | None = None,
) -> Iterator[None]:
    """Inside, the caller loads the model. Its kernels are compiled and loaded meanwhile, and are ready at the end.

    Everything that runs a model on a GPU starts like this. ``on_kernels`` gets the number of kernels that are compiled
    and the number that must be; ``wanted``: what will be run, by a command that knows.
    """
    warming = _start_warming(prepared, kernel_cache, wanted)
    yield
    if warming is not None:
        warming.finish(lambda: on_kernels(warming.done, warming.total))


def _start_warming(prepared: Prepared, kernel_cache: Path | None, wanted: Wanted | None) -> Warming | None:
    """Begin to make the model's kernels ready; nothing on a CPU, which has none. Nor where the GPU passes for another
    card: each kernel is then translated when it is launched (``as_card`` of the lab)."""
    device, setup, memory = prepared.device, prepared.setup, prepared.memory
    if setup.gpu.is_cpu or hardware.is_played():
        return None
    workload = memory.workload
    step = max(workload.step_tokens, workload.sequences)
    if wanted is not None:
        # Drafts of a sequence are rounded up to a power of two.
        wanted = replace(wanted, tokens=max(wanted.tokens, wanted.sequences * max(2 * workload.draft_tokens, 1)))
        step = wanted.tokens

    drafts, head = workload.draft_tokens, prepared.head

    def list_here() -> Mapping[Kernel, Launch]:
        if device.index is not None:
            torch.cuda.set_device(device)  # a thread's own: kernels are loaded to it
        return recorded(prepared.config, setup, prepared.page_size, step, drafts, head, wanted)

    # Where CPU and GPU share the memory, what the model will take of it is not the compilers'.
    left = hardware.system_memory()[1] - (memory.needed if setup.gpu.unified else 0)
    target = GPUTarget("cuda", setup.gpu.sm, WARP_SIZE)
    warming = Warming(list_here, target, kernel_cache, workers(left, SPARE_CORES))
    warming.start()
    return warming
