"""Turns a report that was sent into data for predictions: measured rows, whole-model rows, and a line of README.

A report comes from another person, so it is checked. Rows faster than the card can be, unknown cards, wrong kernels
and reports without measurements are refused.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from microscale.engine.predictions import Phase
from microscale.errors import BadSetting
from microscale.hardware import KNOWN, speeds
from microscale.hardware.speeds import Measured
from microscale_lab.predict import whole_models
from microscale_lab.predict.fit import recounted
from microscale_lab.predict.record import keep
from microscale_lab.predict.whole_models import ModelCase, ModelFile, ModelRow
from microscale_lab.report.card_report import SCHEMA

RAN = "**ran**: correct against float32, and timed"
ROW = re.compile(r"^\| .+? \| \*\*ran\*\*.*\|$", re.MULTILINE)


@dataclass(frozen=True)
class Adopted:
    """What was written."""

    measured: Path
    models: Path | None
    readme: Path | None


def read_report(file: Path) -> dict[str, Any]:
    """A report that may be adopted, or why it may not."""
    try:
        report = json.loads(file.read_text())
        card, schema = report["gpu"]["card"], report["schema"]
        failed, rows = report["kernels"]["failed"], report["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadSetting(f"{file} is no report of `microscale report` ({type(error).__name__}: {error}).") from None
    if schema != SCHEMA:
        raise BadSetting(f"{file} is a report of schema {schema}; this Microscale reads {SCHEMA}.")
    if card not in KNOWN:
        raise BadSetting(f"{file} is of {report['gpu']['name']!r}, which has no row in hardware/cards.py yet.")
    if not report["measured"] or not rows:
        raise BadSetting(f"{file} has no measured rows: it was made without a GPU.")
    if failed:
        raise BadSetting(f"{file}: {len(failed)} kernels were wrong on this card; fix them before their speed counts.")
    assert isinstance(report, dict)
    return report


def adopt(file: Path, readme: Path | None, directory: Path | None = None) -> Adopted:
    """Write the rows of a report into the files of its card's family, and the card into README's table."""
    report = read_report(file)
    name = report["gpu"]["card"]
    card = KNOWN[name]
    versions = (report["software"]["torch"], report["software"]["triton"], report["date"])
    target = (directory or speeds.MEASURED_DIR) / f"{card.family.name}.json"
    if target.exists() and speeds.read(target, card.family).gpu != name:
        held = speeds.read(target, card.family).gpu
        raise BadSetting(f"{target.name} holds rows of {held}; one file holds one card's.")
    names = {field.name for field in fields(Measured)}
    try:
        rows = [Measured(**{key: row[key] for key in names}) for row in report["rows"]]
    except (KeyError, TypeError) as error:
        raise BadSetting(f"{file}: a row of kernels lacks {error}.") from None
    wrong = next((row for row in rows if not row.us > 0 or row.efficiency(card) > speeds.TOO_FAST), None)
    if wrong is not None:
        raise BadSetting(f"{file}: {wrong.implementation}, {wrong.case} is faster than {name} can be.")
    measured = keep(rows, card.family, name, versions, directory)
    models = _models(report, name, versions, directory)
    if readme is not None:
        readme.write_text(with_row(readme.read_text(), readme_row(report)))
    return Adopted(measured, models, readme)


def _models(report: dict[str, Any], card: str, versions: tuple[str, str, str], directory: Path | None) -> Path | None:
    found = [row for row in report["models"] if "us" in row]
    if not found:
        return None
    family = KNOWN[card].family.name
    rows = []
    for row in found:
        case = ModelCase(row["model"], row["precision"], Phase(row["kind"]), row["batch"], row["context"])
        rows.append(ModelRow(case, row["us"], 1.0, 0.0))
    file = whole_models.file_of(family, directory)
    file.parent.mkdir(parents=True, exist_ok=True)
    source = f"a report of {report['date']}, microscale {report['microscale']}"
    file.write_text(recounted(ModelFile(family, card, *versions, source, tuple(rows))).to_json())
    return file


def readme_row(report: dict[str, Any]) -> str:
    """The card's line in README's table of what was proved where."""
    gpu = report["gpu"]
    name = gpu["name"].removeprefix("NVIDIA ").removeprefix("GeForce ")
    return f"| {name} (SM {gpu['capability']}) | {RAN} | itself, {report['kernels']['cases']} cases, {report['date']} |"


def with_row(text: str, row: str) -> str:
    """The page with this row behind the last card that ran, or in place of an older row of the same card."""
    name = row.split("|")[1].strip()
    lines = list(ROW.finditer(text))
    if not lines:
        raise BadSetting("README has no table of what was proved where.")
    for match in lines:
        if match[0].split("|")[1].strip() == name:
            return text[: match.start()] + row + text[match.end() :]
    return text[: lines[-1].end()] + "\n" + row + text[lines[-1].end() :]
