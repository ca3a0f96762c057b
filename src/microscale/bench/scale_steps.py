"""How long a step of one replica takes, and how many tokens it can keep: from what was measured on the card.

Times come from the same prediction as ``explain``: kernels as they were measured, mended by whole models as they were
measured (docs/predictions.md). On an H200 the batches and prompts in between are interpolated, on another card fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from microscale import hardware
from microscale.backends.forecast import total
from microscale.backends.ops import Activations
from microscale.backends.plan import Setup
from microscale.backends.precision import PRECISIONS
from microscale.engine.loading.fit import plan_and_reckon
from microscale.engine.loading.memory import Workload
from microscale.engine.prediction.interval import interval
from microscale.engine.prediction.predict import decode_parts, predict_prompt
from microscale.errors import BadSetting
from microscale.hardware.whole_models import Case, Kind
from microscale.models.config import LayerKind
from microscale.models.families import PRESETS
from microscale.models.outline import outline

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CHUNKS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SHORT, LONG = 192, 8256
"""Contexts between which the cost of a cached token is taken; both were measured."""
PAGE_SIZE = 16


@dataclass(frozen=True)
class Steps:
    """One replica's engine, as far as time and room go."""

    name: str
    decode_us: tuple[float, ...]
    """A step of each batch size from 0 on, at no context."""
    prompt_us: tuple[float, ...]
    """A step of so many prompt tokens, from 0 on, of a prompt that is not cached."""
    read_us: float
    """For a cached token that a sequence reads in a decode step."""
    reread_us: float
    """For each pair of a prompt's token and a cached one before it."""
    cache_tokens: int
    """That the KV cache holds."""
    max_num_seqs: int
    step_tokens: int

    def decode(self, batch: int, context: float) -> float:
        """Seconds of a step in which ``batch`` sequences with ``context`` tokens together get one token each."""
        return (self.decode_us[batch] + self.read_us * context) * 1e-6

    def mixed(self, chunk: int, cached: float, batch: int, context: float) -> float:
        """Seconds of a step that also computes ``chunk`` tokens of a prompt of which ``cached`` are there.

        A chunk reads all experts anyway: a decoding sequence adds a token to it, and its own context.
        """
        tokens = min(chunk + batch, len(self.prompt_us) - 1)
        return (self.prompt_us[tokens] + self.reread_us * chunk * cached + self.read_us * context) * 1e-6


def measured_steps(
    model: str, gpu: str = "h200", precision: str = "exact", max_num_seqs: int = 64, step_tokens: int = 2048
) -> Steps:
    """The engine of one card. Defaults are those of ``microscale serve``."""
    if model not in PRESETS:
        raise BadSetting(f"{model} is no preset; known are {', '.join(PRESETS)}.")
    setup = Setup(hardware.known(gpu), Activations.BF16, precision=PRECISIONS[precision])
    shape = outline(model, PRESETS[model], setup.activations, PAGE_SIZE, LONG)
    workload = Workload(None, max_num_seqs, step_tokens, PAGE_SIZE)
    plan, memory = plan_and_reckon(shape, setup, workload, None)
    if not memory.fits:
        raise BadSetting(f"{model} does not fit one {gpu}; a replica of several cards is not simulated.")

    def decode(batch: int, context: int) -> float:
        parts = total([part.forecast for part in decode_parts(shape, plan, setup, batch, context)])
        return interval(parts, Case(model, precision, Kind.DECODE, batch, context), setup.gpu).us

    def prompt(tokens: int, chunk: int) -> float:
        parts = predict_prompt(shape, plan, setup, tokens, chunk)
        return interval(parts, Case(model, precision, Kind.PREFILL, 1, tokens), setup.gpu).us

    batches = [batch for batch in BATCHES if batch < 2 * max_num_seqs]
    read_us = (decode(1, LONG) - decode(1, SHORT)) / (LONG - SHORT)
    at_none = [decode(batch, SHORT) - read_us * batch * SHORT for batch in batches]
    chunks = [chunk for chunk in CHUNKS if chunk < 2 * step_tokens]
    chunk_us = [prompt(chunk, chunk) for chunk in chunks]
    # A prompt in four steps against four prompts: what rereading its own beginning costs.
    pairs = step_tokens**2 * (1 + 2 + 3)
    reread_us = max(prompt(4 * step_tokens, step_tokens) - 4 * prompt(step_tokens, step_tokens), 0.0) / pairs
    return Steps(
        f"{model} on {gpu}",
        _filled([0, *batches], [0.0, *at_none], max_num_seqs),
        _filled([0, *chunks], [chunk_us[0], *chunk_us], step_tokens + max_num_seqs),
        read_us,
        reread_us,
        memory.pages()[LayerKind.FULL] * PAGE_SIZE,
        max_num_seqs,
        step_tokens,
    )


def _filled(at: list[int], us: list[float], most: int) -> tuple[float, ...]:
    """Every whole number up to ``most``, on straight lines between those that are known."""
    known_to = at[-1]
    line = np.interp(np.arange(min(most, known_to) + 1), at, us)
    slope = (us[-1] - us[-2]) / (at[-1] - at[-2])
    beyond = [us[-1] + slope * (i - known_to) for i in range(known_to + 1, most + 1)]
    return (*map(float, line), *beyond)
