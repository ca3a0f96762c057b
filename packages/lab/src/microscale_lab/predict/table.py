"""Writes the table that ``explain``, ``bench`` and the server's plan look speeds up in: ``engine/predictions.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from microscale.engine.predictions import FILE, Basis, Phase
from microscale.hardware import KNOWN
from microscale.models.families import PRESETS
from microscale.planning.precision import PRECISIONS
from microscale_lab.predict import whole_models
from microscale_lab.predict.fit import kernels
from microscale_lab.predict.interval import Interval, interval
from microscale_lab.predict.whole_models import ModelCase

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (128, 2048, 32768)
PROMPTS = (16, 128, 256, 512, 1024, 2048, 4096, 8192, 32768, 131072)
EXPERIMENTAL = "-tiny"
"""Presets for tests."""
SOURCE = "microscale bench fit --write-table"


def write(done: Callable[[], object] = lambda: None) -> Path:
    """Every preset on every card in every precision; ``done`` is called after each."""
    rows = []
    for row in _rows():
        rows.append(row)
        done()
    head = {"source": SOURCE, "batches": BATCHES, "contexts": CONTEXTS, "prompts": PROMPTS}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    body = ",\n".join(f"  {json.dumps(row, separators=(', ', ':'))}" for row in rows)
    FILE.write_text("\n".join(["{", *lines, ' "rows": [', body, " ]", "}", ""]))
    return FILE


def models() -> list[str]:
    return [name for name in PRESETS if not name.endswith(EXPERIMENTAL)]


def num_rows() -> int:
    return len(models()) * len(KNOWN) * len(PRECISIONS)


def _rows() -> Iterator[dict[str, Any]]:
    for model in models():
        for card in KNOWN:
            for precision in PRECISIONS:
                yield _row(model, card, precision)


def _row(model: str, card: str, precision: str) -> dict[str, Any]:
    longest = PRESETS[model].max_context
    by_batch = [[_time(model, card, precision, Phase.DECODE, batch, size) for size in CONTEXTS] for batch in BATCHES]
    prompts = [_time(model, card, precision, Phase.PREFILL, 1, min(tokens, longest)) for tokens in PROMPTS]
    return {
        "model": model,
        "gpu": card,
        "precision": precision,
        "basis": _basis(model, card, precision),
        "decode_us": [[round(time.us) for time in row] for row in by_batch],
        "decode_factor": [round(max(_factor(time) for time in row), 2) for row in by_batch],
        "prefill_us": [round(time.us) for time in prompts],
        "prefill_factor": [round(_factor(time), 2) for time in prompts],
    }


def _time(model: str, card: str, precision: str, kind: Phase, batch: int, context: int) -> Interval:
    case = ModelCase(model, precision, kind, batch, context)
    return interval(kernels(case, KNOWN[card]), case, KNOWN[card])


def _factor(time: Interval) -> float:
    return time.high_us / time.us


def _basis(model: str, card: str, precision: str) -> str:
    rows = whole_models.known(KNOWN[card].family)
    measured: Sequence[whole_models.ModelRow] = () if rows is None or rows.gpu != card else rows.rows
    here = any((row.case.model, row.case.precision) == (model, precision) for row in measured)
    return (Basis.MEASURED if here else Basis.FITTED).value
