"""From options to an engine: the model, as many KV pages as fit beside it, scheduler and sampler.

Needs nothing of the server's: benchmarks build their engine here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from microscale import hardware
from microscale.backends.plan import Setup
from microscale.engine.engine import Engine
from microscale.engine.grammar import Grammars, Vocabulary
from microscale.engine.loading.description import describe
from microscale.engine.loading.fit import check_fits
from microscale.engine.loading.load import LoadOptions, choose_activations, choose_device, load_model
from microscale.engine.loading.memory import Memory
from microscale.engine.step.limits import Limits
from microscale.engine.step.pages import PagePool
from microscale.engine.step.runner import Model, ModelRunner
from microscale.engine.step.sampler import Sampler
from microscale.engine.step.scheduler import Scheduler
from microscale.models.config import LayerKind
from microscale.models.families import ModelConfig, ModelWeights
from microscale.models.outline import outline

KEPT_WINDOWS = 8
"""One byte in so many of what is left after the least that sequences need goes to sliding layers, for windows at which
prefixes may go on. An estimate: a window of 128 is an eighth of a prompt of 1024."""


@dataclass(frozen=True)
class Queueing:
    """What the scheduler may do, beside what the workload says."""

    max_queue: int = 1024
    prefix_caching: bool = True


@dataclass(frozen=True)
class Built:
    """An engine and what its owner must know of the model."""

    engine: Engine
    config: ModelConfig
    max_model_len: int
    plan: str
    """What runs and why, and where memory goes: see ``running``."""


def build_engine(
    options: LoadOptions,
    queueing: Queueing,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    enforce_eager: bool = False,
    vocabulary: Vocabulary | None = None,
) -> Built:
    """Load a model and make an engine of it. ``on_progress`` hears how many layers of all are ready."""
    opened: list[ModelWeights] = []
    done = 0

    def layer_done() -> None:
        nonlocal done
        done += 1
        on_progress(done, opened[0].config.num_layers)

    # Before the load: afterwards the weights would be counted twice, as needed and as no longer free.
    memory: list[Memory] = []

    def on_open(weights: ModelWeights) -> None:
        opened.append(weights)
        memory.append(_reckon(options, weights.config))
        on_progress(0, weights.config.num_layers)

    model = load_model(options, on_open, layer_done)
    config = model.config
    pages = num_pages(memory[0])
    # Where the user named no context, it is the model's, as far as the pages reach.
    max_model_len = options.workload.context or min(config.max_context, pages[LayerKind.FULL] * options.page_size)
    limits = Limits(
        page_size=options.page_size,
        window=config.sliding_window,
        max_num_seqs=options.workload.sequences,
        max_num_batched_tokens=options.workload.step_tokens,
        max_model_len=max_model_len,
        max_queue=queueing.max_queue,
        prefix_caching=queueing.prefix_caching,
    )
    engine = assemble(model, limits, pages, enforce_eager=enforce_eager, vocabulary=vocabulary)
    return Built(engine, config, max_model_len, describe(model.ops.plan, options.precision, memory[0], pages))


def assemble(
    model: Model,
    limits: Limits,
    pages: Mapping[LayerKind, int],
    *,
    enforce_eager: bool = False,
    vocabulary: Vocabulary | None = None,
) -> Engine:
    """Scheduler, runner and sampler around a loaded model, with so many KV pages for each kind of layer."""
    pools = {kind: PagePool(count) for kind, count in pages.items()}
    config = model.config
    grammars = None if vocabulary is None else Grammars(vocabulary, config.vocab_size)
    sampler = Sampler(model.sampling, config.vocab_size, model.device, config.eos_token_ids, grammars)
    runner = ModelRunner(model, pools, limits, enforce_eager=enforce_eager)
    return Engine(runner, Scheduler(pools, limits), sampler, config.vocab_size, config.eos_token_ids)


def _reckon(options: LoadOptions, config: ModelConfig) -> Memory:
    """The sums by which ``load_model`` lets the model pass."""
    device = choose_device(options.device)
    gpu = hardware.cpu() if device.type == "cpu" else hardware.detect(device.index or 0)
    setup = Setup(gpu, choose_activations(options.dtype, device), options.wish, options.precision)
    shape = outline(options.model, config, setup.activations, options.page_size, config.max_context)
    workload = replace(options.workload, page_size=options.page_size)
    return check_fits(shape, setup, workload, hardware.available_memory(gpu, device.index or 0))


def num_pages(memory: Memory) -> dict[LayerKind, int]:
    """How many pages each kind of layer gets of what ``check_fits`` has found to suffice.

        usable = fixed | sliding: a window and a page a sequence, one step | full: all the rest but an eighth | windows

    Full layers get at least what was promised: every sequence at the context that must fit. On a CPU, whose memory is
    not ours to fill, they get no more than every sequence at full length.
    """
    kv, work = memory.kv, memory.workload

    def pages(positions: int) -> int:
        return -(-positions // kv.page_size)

    context = pages(memory.context)
    sliding = work.sequences * min(pages(kv.window) + 1, context) + min(pages(work.step_tokens), context)
    # A model without one of the kinds gives its pages no bytes; then any number will do.
    full_bytes = max(kv.full_per_token * kv.page_size, 1)
    sliding_bytes = max(kv.sliding_per_position * kv.page_size, 1)
    left = memory.usable - memory.fixed - sliding * sliding_bytes
    full = max((left - left // KEPT_WINDOWS) // full_bytes, work.sequences * context)
    if memory.gpu.is_cpu:
        full = min(full, work.sequences * pages(work.context or memory.model_context))
    windows = max(left - full * full_bytes, 0) // sliding_bytes
    if memory.gpu.is_cpu:
        windows = min(windows, sliding)
    return {LayerKind.FULL: full, LayerKind.SLIDING: sliding + windows}
