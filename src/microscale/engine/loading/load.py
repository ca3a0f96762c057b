"""From what was prepared to a model that is ready to run."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from microscale.backends.ops import Ops
from microscale.engine.loading.prepare import Prepared
from microscale.engine.step.threads import all_threads
from microscale.hardware import GIB
from microscale.models.families import AnyModel, build_model

log = logging.getLogger(__name__)


def load(prepared: Prepared, on_layer: Callable[[], None] = lambda: None) -> AnyModel:
    """Read the weights onto the device, in the layouts of the plan. ``on_layer`` hears each layer as it is ready."""
    setup, threads = prepared.setup, prepared.options.threads
    log.info("%s\n%s", _headline(prepared), prepared.plan.table())
    # Packing has all of them, also after a model whose last step had few.
    torch.set_num_threads(threads or all_threads())
    ops = Ops(setup.gpu, setup.activations, setup.preference, setup.precision, prepared.plan, threads)
    return build_model(prepared.weights, ops, prepared.device, prepared.page_size, on_layer)


def _headline(prepared: Prepared) -> str:
    """What is loaded where, in one line above the plan's table."""
    weights = sum(prepared.memory.weights.values()) / GIB
    setup = prepared.setup
    return f"{prepared.options.model} on {setup.gpu.name}, precision {setup.precision}, weights {weights:.2f} GiB"
