"""Turns rows of kernel benchmarks into the measured speeds that the oracle predicts with.

``hardware/measured/<family>.json`` is written anew with these rows in place of older ones of the same case.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton

from microscale.bench.rows import Row
from microscale.errors import Unsupported
from microscale.hardware import Gpu, card_name, speeds
from microscale.hardware.speeds import Measured, SpeedFile


def record(rows: Sequence[Row], gpu: Gpu, directory: Path | None = None) -> Path:
    """Write the rows into the file of the card's family."""
    card = card_name(gpu)
    if card is None:
        raise Unsupported(f"{gpu.name} is not in the table of known cards, so its times say nothing about efficiency.")
    measured = tuple(
        Measured(
            row.op,
            row.implementation,
            row.case,
            round(row.gbs * row.us * 1e3),
            round(row.tflops * row.us * 1e6),
            row.unit,
            row.launched.path,
            row.launched.launches,
            row.launched.programs,
            round(row.us, 2),
        )
        for row in rows
    )
    file = (directory or speeds.MEASURED_DIR) / f"{gpu.family.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    old = speeds.read(file, gpu.family) if file.exists() else None
    versions = (str(torch.__version__), str(triton.__version__), datetime.now(UTC).date().isoformat())
    file.write_text(speeds.merge(old, SpeedFile(gpu.family.name, card, *versions, measured)).to_json())
    return file
