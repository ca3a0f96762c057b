"""Turns rows of kernel benchmarks into the measured speeds that the oracle predicts with.

``hardware/measured/<family>.json`` is written anew with these rows in place of older ones of the same case.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton

from microscale.errors import Unsupported
from microscale.hardware import Family, Gpu, card_name, known, speeds
from microscale.hardware.speeds import Measured, SpeedFile
from microscale_lab.kernel_bench.rows import Row


def record(rows: Sequence[Row], gpu: Gpu, directory: Path | None = None, played: str | None = None) -> Path:
    """Write the rows into the file of the card's family. ``played``: the card whose kernels ``gpu`` ran."""
    card = card_name(gpu)
    if card is None:
        raise Unsupported(f"{gpu.name} is not in the table of known cards, so its times say nothing about efficiency.")
    found = [measured(row) for row in rows]
    if played is None:
        return keep(found, gpu.family, card, _versions(), directory)
    folder = (directory or speeds.MEASURED_DIR) / speeds.PLAYED
    return keep(found, known(played).family, played, _versions(), folder, runs_on=card)


def measured(row: Row) -> Measured:
    """A benchmark's row as the file keeps it."""
    work = (round(row.gbs * row.us * 1e3), round(row.tflops * row.us * 1e6), row.unit)
    launched = row.launched
    return Measured(
        row.op, row.implementation, row.case, *work,
        launched.path, launched.launches, launched.programs, round(row.us, 2),
    )  # fmt: skip


def _versions() -> tuple[str, str, str]:
    return str(torch.__version__), str(triton.__version__), datetime.now(UTC).date().isoformat()


def keep(
    rows: Sequence[Measured],
    family: Family,
    card: str,
    versions: tuple[str, str, str],
    directory: Path | None = None,
    runs_on: str | None = None,
) -> Path:
    """Put rows into the file of a family. ``versions``: torch, Triton and the date."""
    file = (directory or speeds.MEASURED_DIR) / f"{family.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    old = speeds.read(file, family) if file.exists() else None
    file.write_text(speeds.merge(old, SpeedFile(family.name, card, *versions, tuple(rows), runs_on)).to_json())
    return file
