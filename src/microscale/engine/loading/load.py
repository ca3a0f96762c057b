"""From what was prepared to a model that is ready to run."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from microscale import hardware
from microscale.engine.loading.prepare import Prepared
from microscale.engine.loading.usable import check_left
from microscale.hardware import GIB
from microscale.models.families import AnyModel, build_model
from microscale.planning.ops import Ops, RankSums
from microscale.planning.ranks import ALONE
from microscale.planning.threads import all_threads

log = logging.getLogger(__name__)

STEP = 64 << 20
"""Bytes between two messages of progress."""


def load(
    prepared: Prepared,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    ranks: RankSums = ALONE,
) -> AnyModel:
    """Read the weights onto the device, in the layouts of the plan. ``on_progress`` gets the bytes that are loaded
    and their total. ``ranks``: the others, for one that is not the first; the first has its team."""
    setup, threads = prepared.setup, prepared.options.threads
    log.info("%s\n%s", _headline(prepared), prepared.plan.table())
    # Packing has all of them, also after a model whose last step had few.
    torch.set_num_threads(threads or all_threads())
    team = prepared.team
    if team is not None:
        ranks = team.join(prepared.device)
    ops = Ops(setup.gpu, setup.activations, setup.preference, setup.precision, prepared.plan, threads, ranks)
    progress = _Progress(prepared, on_progress)
    with prepared.weights.reading(prepared.device, progress.on_read):
        progress.start()
        model = build_model(prepared.weights, ops, prepared.device, prepared.page_size, progress.on_layer)
    if prepared.device.type == "cuda":
        torch.cuda.empty_cache()  # what held the checkpoint's own layout until it was packed
    if team is not None:
        team.loaded()
    return model


class _Progress:
    """Bytes that were read. Where none are, since the weights are made and not read, layers in their bytes."""

    def __init__(self, prepared: Prepared, on_progress: Callable[[int, int], None]) -> None:
        self._report = on_progress
        self._num_layers = prepared.config.num_layers
        self._weights = sum(prepared.memory.weights.values())
        self._layers = 0
        self._reported = -STEP
        self._reads = False
        self._prepared = prepared

    def start(self) -> None:
        if not self._reads:
            self._report(0, self._weights)

    def on_read(self, done: int, total: int) -> None:
        self._reads = True
        if done == total or done - self._reported >= STEP:
            self._reported = done
            self._report(done, total)

    def on_layer(self) -> None:
        self._layers += 1
        if self._prepared.team is not None:
            self._prepared.team.check()
        gpu = self._prepared.setup.gpu
        if gpu.unified and not gpu.is_cpu:
            left = hardware.available_memory(gpu, self._prepared.device.index or 0)
            check_left(gpu, self._prepared.memory.workload.reserve, left)
        if not self._reads:
            self._report(self._weights * self._layers // self._num_layers, self._weights)


def _headline(prepared: Prepared) -> str:
    """What is loaded where, in one line above the plan's table."""
    weights = sum(prepared.memory.weights.values()) / GIB
    setup = prepared.setup
    return f"{prepared.options.model} on {setup.gpu.name}, precision {setup.precision}, weights {weights:.2f} GiB"
