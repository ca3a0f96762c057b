"""Writes the table that ``explain``, ``bench`` and the server's plan look speeds up in: ``engine/predictions.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from microscale.engine.loading.fit import plan_and_size
from microscale.engine.loading.memory import LEAST_CONTEXT, Workload
from microscale.engine.predictions import FILE, Basis, Phase
from microscale.errors import Unsupported
from microscale.hardware import KNOWN
from microscale.models.families import PRESETS
from microscale.models.outline import outline
from microscale.planning.ops import Activations
from microscale.planning.plan import Setup
from microscale.planning.precision import PRECISIONS
from microscale_lab.predict import whole_models
from microscale_lab.predict.fit import PAGE_SIZE, kernels
from microscale_lab.predict.interval import Interval, interval
from microscale_lab.predict.whole_models import ModelCase

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (128, 2048, 32768)
PROMPTS = (16, 128, 256, 512, 1024, 2048, 4096, 8192, 32768, 131072)
EXPERIMENTAL = "-tiny"
"""Presets for tests."""
SOURCE = "microscale bench fit --write-table"


def write(done: Callable[[], object] = lambda: None) -> Path:
    """Every preset in every precision on every card whose memory holds its weights; ``done`` is called after each."""
    rows = []
    for case in cases():
        rows.append(_row(*case))
        done()
    head = {"source": SOURCE, "batches": BATCHES, "contexts": CONTEXTS, "prompts": PROMPTS}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    body = ",\n".join(f"  {json.dumps(row, separators=(',', ':'))}" for row in rows)
    FILE.write_text("\n".join(["{", *lines, ' "rows": [', body, " ]", "}", ""]))
    return FILE


def models() -> list[str]:
    return [name for name in PRESETS if not name.endswith(EXPERIMENTAL)]


@cache
def cases() -> tuple[tuple[str, str, str], ...]:
    """Model, card and precision. A model that a card cannot hold gets no speed there."""
    return tuple(case for case in product(models(), KNOWN, PRECISIONS) if _holds(*case))


def _holds(model: str, card: str, precision: str) -> bool:
    config = PRESETS[model]
    as_published = replace(PRECISIONS[precision], weights_only=config.weights_only)
    setup = Setup(KNOWN[card], Activations.BF16, precision=as_published)
    shape = outline(model, config, setup.activations, PAGE_SIZE, LEAST_CONTEXT)
    try:
        _, memory = plan_and_size(shape, setup, Workload(LEAST_CONTEXT, utilization=1.0))
    except Unsupported:  # BF16 experts run in another format only
        return False
    return memory.fits


def _row(model: str, card: str, precision: str) -> dict[str, Any]:
    longest = PRESETS[model].max_context
    by_batch = [[_time(model, card, precision, Phase.DECODE, batch, size) for size in CONTEXTS] for batch in BATCHES]
    prompts = [_time(model, card, precision, Phase.PREFILL, 1, min(tokens, longest)) for tokens in PROMPTS]
    return {
        "model": model,
        "gpu": card,
        "precision": precision,
        "basis": _basis(model, card, precision),
        "decode_us": [[_rounded(time.us) for time in row] for row in by_batch],
        "decode_factor": [round(max(_factor(time) for time in row), 2) for row in by_batch],
        "prefill_us": [_rounded(time.us) for time in prompts],
        "prefill_factor": [round(_factor(time), 2) for time in prompts],
    }


def _time(model: str, card: str, precision: str, kind: Phase, batch: int, context: int) -> Interval:
    case = ModelCase(model, precision, kind, batch, context)
    return interval(kernels(case, KNOWN[card]), case, KNOWN[card])


def _rounded(us: float) -> int:
    """Four digits."""
    return int(float(f"{us:.4g}"))


def _factor(time: Interval) -> float:
    return time.high_us / time.us


def _basis(model: str, card: str, precision: str) -> str:
    rows = whole_models.known(KNOWN[card].family)
    measured: Sequence[whole_models.ModelRow] = () if rows is None or rows.gpu != card else rows.rows
    here = any((row.case.model, row.case.precision) == (model, precision) for row in measured)
    return (Basis.MEASURED if here else Basis.FITTED).value
