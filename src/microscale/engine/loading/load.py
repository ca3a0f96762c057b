"""From what the user asked for to a model that is ready to run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from microscale import hardware
from microscale.backends.ops import Activations, Ops, Wish
from microscale.backends.plan import Setup, make_plan
from microscale.backends.precision import EXACT, Precision
from microscale.engine.loading.fit import check_fits
from microscale.engine.loading.memory import Memory, Workload
from microscale.engine.step.threads import all_threads, check_threads
from microscale.errors import BadSetting
from microscale.hardware import GIB
from microscale.models.families import AnyModel, LoadFormat, ModelWeights, build_model, open_weights
from microscale.models.outline import outline

MAX_PAGE_SIZE = 1024
log = logging.getLogger(__name__)
DTYPES = {"float32": Activations.FLOAT32, "bfloat16": Activations.BF16}


@dataclass(frozen=True)
class LoadOptions:
    """What decides how a model is loaded. Names follow the command line's flags."""

    model: str
    load_format: LoadFormat | str = LoadFormat.AUTO
    device: str = "auto"
    """``auto`` (the first GPU, else the CPU), ``cpu``, ``cuda`` or ``cuda:1``."""
    dtype: str = "auto"
    """Type of the activations: ``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    wish: Wish = field(default_factory=Wish)
    precision: Precision = EXACT
    workload: Workload = field(default_factory=Workload)
    """What must fit beside the weights; its page size is replaced by ``page_size``."""
    overrides: Mapping[str, object] = field(default_factory=dict)
    page_size: int = 16
    offline: bool = False
    seed: int = 0
    threads: int | None = None
    """CPU threads of every step; ``None``: by its size."""


def choose_device(name: str) -> torch.device:
    """The device that ``--device`` means, checked to be there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadSetting(f"Unknown device {name!r}; use auto, cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise BadSetting(f"Device {name!r} is not supported; use auto, cpu, cuda or cuda:N.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise BadSetting(f"Device {name!r} is not there: torch sees {count} CUDA GPUs; `microscale doctor` says why.")
    return device


def choose_activations(dtype: str, device: torch.device) -> Activations:
    """The activations' type that ``--dtype`` means on this device."""
    if dtype == "auto":
        return Activations.BF16 if device.type == "cuda" else Activations.FLOAT32
    if dtype not in DTYPES:
        raise BadSetting(f"Unknown dtype {dtype!r}; use auto, {' or '.join(DTYPES)}.")
    return DTYPES[dtype]


def load_model(
    options: LoadOptions,
    on_open: Callable[[ModelWeights], None] = lambda weights: None,
    on_layer: Callable[[], None] = lambda: None,
) -> AnyModel:
    """Open, check and load. ``on_open`` hears the checked weights, then ``on_layer`` each layer as it is ready."""
    if not 1 <= options.page_size <= MAX_PAGE_SIZE:
        raise BadSetting(f"--block-size is {options.page_size}; a page holds 1 to {MAX_PAGE_SIZE} positions.")
    check_threads(options.threads)
    device = choose_device(options.device)
    gpu = hardware.cpu() if device.type == "cpu" else hardware.detect(device.index or 0)
    activations = choose_activations(options.dtype, device)
    options.wish.check()
    weights = open_weights(
        options.model,
        load_format=options.load_format,
        overrides=options.overrides,
        offline=options.offline,
        seed=options.seed,
    )
    on_open(weights)
    setup = Setup(gpu, activations, options.wish, options.precision)
    shape = outline(options.model, weights.config, activations, options.page_size, weights.config.max_context)
    plan = make_plan(options.model, shape.uses, setup)
    workload = replace(options.workload, page_size=options.page_size)
    memory = check_fits(shape, setup, workload, hardware.available_memory(gpu, device.index or 0))
    log.info("%s\n%s", _headline(options, memory), plan.table())
    # Packing has all of them, also after a model whose last step had few.
    torch.set_num_threads(options.threads or all_threads())
    ops = Ops(gpu, activations, options.wish, options.precision, plan, options.threads)
    return build_model(weights, ops, device, options.page_size, on_layer)


def _headline(options: LoadOptions, memory: Memory) -> str:
    """What is loaded where, in one line above the plan's table."""
    weights = sum(memory.weights.values()) / GIB
    return f"{options.model} on {memory.gpu.name}, precision {options.precision}, weights {weights:.2f} GiB"
