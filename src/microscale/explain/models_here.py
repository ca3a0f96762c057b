"""Which published models this machine can run: whether each fits, how fast it is, and whether it is on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import huggingface_hub

from microscale import hardware
from microscale.engine.loading.cpu_speed import decode_speed
from microscale.engine.loading.fit import plan_and_size
from microscale.engine.loading.memory import Memory, Workload
from microscale.engine.predictions import SHORT_CONTEXT, Phase, predict
from microscale.errors import Unsupported
from microscale.explain.report import CONTEXT, PAGE_SIZE, STEP_TOKENS, read_model
from microscale.models.checkpoint import INDEX, SINGLE
from microscale.models.json_object import read_json_object
from microscale.models.known_checkpoints import PUBLISHED
from microscale.models.outline import Outline, outline
from microscale.planning.decision import Plan
from microscale.planning.ops import Activations
from microscale.planning.plan import Setup
from microscale.planning.precision import PRECISIONS


@dataclass(frozen=True)
class ModelHere:
    """One model on this machine, for one sequence."""

    model: str
    hub_id: str
    precision: str
    """The most exact one that fits."""
    fits: bool
    needed_gib: float
    usable_gib: float
    tok_s: float | None
    low: float | None
    high: float | None
    """The 90 % interval, where it is known."""
    basis: str
    """``at most``: of a CPU, whose reads are measured and nothing else."""
    on_disk: str
    """``yes``, ``no`` or ``in part``."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def models_here() -> Iterator[ModelHere]:
    gpu = hardware.present()
    available = hardware.available_memory(gpu)
    for model, hub_id in PUBLISHED.items():
        yield _best(model, hub_id, gpu, available)


def _best(model: str, hub_id: str, gpu: hardware.Gpu, available: int) -> ModelHere:
    """In the most exact precision that fits; if none does, in the one that needs least."""
    config = read_model(model)
    activations = Activations.FLOAT32 if gpu.is_cpu else Activations.BF16
    context = min(CONTEXT, config.max_context)
    shape = outline(model, config, activations, PAGE_SIZE, context)
    tried: list[tuple[Setup, Plan, Memory]] = []
    for precision in PRECISIONS.values():
        setup = Setup(gpu, activations, precision=replace(precision, weights_only=config.weights_only))
        try:
            plan, memory = plan_and_size(shape, setup, Workload(context, 1, STEP_TOKENS, PAGE_SIZE, 0.9), available)
        except Unsupported:
            continue
        tried.append((setup, plan, memory))
        if memory.fits:
            break
    setup, plan, memory = tried[-1] if tried[-1][2].fits else min(tried, key=lambda each: each[2].needed)
    return ModelHere(
        model, hub_id, setup.precision.name, memory.fits,
        round(memory.needed / hardware.GIB, 1), round(memory.usable / hardware.GIB, 1),
        *(_speed(shape, plan, setup, memory) if memory.fits else (None, None, None, "")), on_disk(hub_id),
    )  # fmt: skip


def _speed(
    shape: Outline, plan: Plan, setup: Setup, memory: Memory
) -> tuple[float | None, float | None, float | None, str]:
    """Tokens per second, their interval, and what they are based on."""
    if setup.gpu.is_cpu:
        return decode_speed(shape, plan, setup, memory), None, None, "at most"
    point = predict(shape, plan, setup, Phase.DECODE, 1, SHORT_CONTEXT, STEP_TOKENS)
    return point.tok_s, point.low, point.high, point.basis.value


def on_disk(hub_id: str) -> str:
    """Whether all weights of a repository are in the hub's cache."""

    def cached(name: str) -> Path | None:
        found = huggingface_hub.try_to_load_from_cache(hub_id, name)
        return Path(found) if isinstance(found, str) else None

    if cached("config.json") is None:
        return "no"
    index = cached(INDEX)
    names = {SINGLE} if index is None else set(map(str, read_json_object(index).nested("weight_map").data.values()))
    return "yes" if all(cached(name) for name in names) else "in part"
