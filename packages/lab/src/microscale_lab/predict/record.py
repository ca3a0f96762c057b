"""Writes rows of kernel benchmarks into the files of measured speeds.

Rows of a card go to ``hardware/measured/<family>.json`` of Microscale, where the oracle reads them. Rows that another
card's kernels took on the GPU at hand (``bench kernels --as CARD --record``) go to ``measured/played`` here, and only
the fit uses them. New rows replace older ones of the same case.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton

from microscale.errors import Unsupported
from microscale.hardware import FAMILY_OF_SM, Family, Gpu, card_name, known, speeds
from microscale.hardware.data_files import read_object
from microscale.hardware.speeds import HEAD, Measured, SpeedFile
from microscale_lab.kernel_bench.rows import KernelRow
from microscale_lab.predict.rates import stand_in

DATA = Path(__file__).parent / "measured"
PLAYED = "played"


def record(rows: Sequence[KernelRow], gpu: Gpu, directory: Path | None = None, played: str | None = None) -> Path:
    """Write the rows into the file of the card's family. ``played``: the card whose kernels ``gpu`` ran."""
    card = card_name(gpu)
    if card is None:
        raise Unsupported(f"{gpu.name} is not in the table of known cards, so its times say nothing about efficiency.")
    found = [measured(row) for row in rows]
    if played is None:
        return keep(found, gpu.family, card, _versions(), directory)
    folder = (directory or DATA) / PLAYED
    return keep(found, known(played).family, played, _versions(), folder, runs_on=card)


def measured(row: KernelRow) -> Measured:
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
    old = None
    if file.exists():
        old = speeds.read(file, family) if runs_on is None else read_played(file)[0]
    new = merge(old, SpeedFile(family.name, card, *versions, tuple(rows)))
    file.write_text(to_json(new, runs_on))
    return file


def merge(old: SpeedFile | None, new: SpeedFile) -> SpeedFile:
    """``new`` with those rows of ``old`` whose case it did not measure again."""
    fresh = {(row.op, row.implementation, row.case) for row in new.rows}
    kept = () if old is None else old.rows
    rows = (*(row for row in kept if (row.op, row.implementation, row.case) not in fresh), *new.rows)
    ordered = sorted(rows, key=lambda row: (row.op, row.implementation, row.flops, row.bytes))
    return replace(new, rows=tuple(ordered))


def to_json(file: SpeedFile, runs_on: str | None = None) -> str:
    """``runs_on``: the card that ran the kernels, where it was not the file's own (``--as``)."""
    head = {name: getattr(file, name) for name in HEAD} | ({} if runs_on is None else {"runs_on": runs_on})
    rows = ",\n".join(f"  {json.dumps(asdict(row))}" for row in file.rows)
    return "\n".join(
        ["{", *(f" {json.dumps(k)}: {json.dumps(v)}," for k, v in head.items()), ' "rows": [', rows, " ]", "}", ""]
    )


def read_played(file: Path) -> tuple[SpeedFile, Gpu]:
    """Rows of another card's kernels, and the rates of the card that ran them."""
    data = read_object(file, speeds.AGAIN)
    families = {family.name: family for family in FAMILY_OF_SM.values()}
    card, runs_on = known(str(data.get("gpu"))), data.pop("runs_on", None)
    rates = stand_in(card_name(known(str(runs_on))) or "", card_name(card) or "")
    return speeds.parse(file, data, families[file.stem], rates), rates


def played_files() -> list[tuple[SpeedFile, Gpu]]:
    return [read_played(file) for file in sorted((DATA / PLAYED).glob("*.json"))]
