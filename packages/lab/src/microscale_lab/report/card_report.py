"""``microscale report``: what a card does with our kernels, for its owner to send.

One run: the machine as ``doctor`` sees it, every kernel executed against the float32 reference, kernels and whole
models timed and compared with predictions, and clocks, power and throttling meanwhile. Without a GPU the kernels are
executed on the CPU as a named card's, and nothing is timed. The result names no person, host, path or serial number.
"""

from __future__ import annotations

import getpass
import io
import json
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console

from microscale import doctor
from microscale.engine.predictions import Phase
from microscale.errors import MicroscaleError, Unsupported
from microscale.explain.report import Question, explain
from microscale.hardware import GIB, Gpu, card_name
from microscale.planning.precision import PRECISIONS
from microscale.version import __version__
from microscale_lab.kernel_bench import kernels
from microscale_lab.kernel_bench.rows import WrongResult
from microscale_lab.predict import record, sweep
from microscale_lab.predict.whole_models import ModelCase
from microscale_lab.prove.command import run_cases
from microscale_lab.report.telemetry import watched

SCHEMA = 1
MODELS = ("gpt-oss-20b", "gemma-4-26b-a4b", "gpt-oss-120b")
BENCH_MINUTES = 4.0
"""For the rows of one model."""


@dataclass(frozen=True)
class ReportScope:
    """What the report covers. Without a GPU nothing is timed."""

    gpu: Gpu
    """The card whose kernels are executed: the one that is here, or a named one on the CPU."""
    on_gpu: bool
    quick: bool = False
    ops: tuple[str, ...] = ()
    """Ops whose kernels are executed; none: all."""
    models: tuple[str, ...] = MODELS
    cache_dir: Path | None = None


Report = Callable[[str], None]


def make(asked: ReportScope, report: Report = lambda text: None) -> dict[str, Any]:
    """The whole report as JSON."""
    began = time.monotonic()
    with watched() as seen:
        report("executing kernels")
        executed = _executed(asked)
        rows, row_faults = _kernel_rows(asked, report)
        models = _models(asked, report)
    found = {
        "schema": SCHEMA,
        "microscale": __version__,
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": _card(asked.gpu),
        "measured": asked.on_gpu,
        "software": {
            "torch": str(torch.__version__),
            "triton": str(triton.__version__),
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "doctor": [asdict(finding) for finding in doctor.examine()],
        "kernels": executed,
        "rows": rows,
        "row_faults": row_faults,
        "models": models,
        "telemetry": seen.to_json(),
        "seconds": round(time.monotonic() - began, 1),
    }
    cleaned = clean(json.loads(json.dumps(found)))
    assert isinstance(cleaned, dict)
    return cleaned


def _card(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "card": card_name(gpu),
        "family": gpu.family.name,
        "capability": gpu.capability,
        "num_sms": gpu.num_sms,
        "memory_gib": round(gpu.memory_bytes / GIB, 1),
        "unified": gpu.unified,
    }


def _executed(asked: ReportScope) -> dict[str, Any]:
    """Every kernel against the reference, op by op."""
    card = card_name(asked.gpu)
    if card is None:
        return {"executed_on": None, "cases": 0, "failed": [], "missing": f"{asked.gpu.name} is in no table of cards"}
    rows: list[dict[str, Any]] = []
    for op in asked.ops or (None,):
        out = io.StringIO()
        run_cases(
            gpu=card,
            op=op,
            device="cuda" if asked.on_gpu else "cpu",
            quick=asked.quick or not asked.on_gpu,
            cache_dir=asked.cache_dir,
            json_output=True,
            console=Console(file=out, width=120),
        )
        rows += json.loads(out.getvalue())
    failed = [{"op": row["op"], "variant": row["variant"], "reason": row["reason"]} for row in rows if not row["ok"]]
    where = card if asked.on_gpu else "cpu"
    return {"executed_on": where, "cases": sum(row["cases"] for row in rows), "failed": failed}


def _kernel_rows(asked: ReportScope, report: Report) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of ``bench kernels``, as ``--record`` keeps them."""
    if not asked.on_gpu:
        return [], []
    found: list[dict[str, Any]] = []
    faults: list[str] = []
    for op in kernels.KernelBench:
        models: tuple[str | None, ...] = MODELS if op is kernels.KernelBench.MOE else (None,)
        for model in models:
            report(f"timing {op.value} {model or ''}".rstrip())
            try:
                found += [asdict(record.measured(row)) for row in kernels.run(op, model)]
            except (Unsupported, WrongResult, torch.OutOfMemoryError) as error:
                faults.append(f"{op.value} {model or ''}: {str(error).splitlines()[0]}")
    return found, faults


def _models(asked: ReportScope, report: Report) -> list[dict[str, Any]]:
    """Whole models that fit, with what was predicted of each row."""
    if not asked.on_gpu:
        return []
    found = []
    for model in asked.models:
        try:
            for row in sweep.run(model, ("exact", "fast"), (), time.monotonic() + 60 * BENCH_MINUTES, report):
                found.append({**row.to_json(), **predicted(row.case, asked.gpu)})
        except (MicroscaleError, torch.OutOfMemoryError) as error:
            found.append({"model": model, "missing": str(error).splitlines()[0]})
    return found


def predicted(case: ModelCase, gpu: Gpu) -> dict[str, float | None]:
    """What ``explain`` says of a case, in microseconds with its interval, if it has one."""
    precision = PRECISIONS[case.precision]
    report = explain(Question(case.model, card_name(gpu), precision, context=case.context, batch=case.batch))
    point = report.asked if case.kind is Phase.DECODE else report.prompt
    if point is None:  # by the estimate of its memory it does not fit, and yet it ran
        return {"predicted_us": None, "low_us": None, "high_us": None}
    work = case.batch if case.kind is Phase.DECODE else case.context
    low, high = (rate and round(work / rate * 1e6, 1) for rate in (point.high, point.low))
    return {"predicted_us": round(point.us, 1), "low_us": low, "high_us": high}


# ---- anonymous reports ----------------------------------------------------------------------------------------------

_PATH = re.compile(r"(?<![\w.:/])(?:~|[A-Za-z]:)?/[\w.+@~-]+(?:/[\w.+@~-]*)+")
_UUID = re.compile(r"\b(?:GPU-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_ADDRESS = re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b|\b(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}\b")


def clean(value: Any, names: Sequence[str] | None = None) -> Any:
    """The same without paths, addresses, UUIDs, and the names of user and host."""
    if names is None:
        names = [name for name in (platform.node(), _user()) if len(name) > 2]
    if isinstance(value, dict):
        return {key: clean(entry, names) for key, entry in value.items()}
    if isinstance(value, list):
        return [clean(entry, names) for entry in value]
    if not isinstance(value, str):
        return value
    for pattern, stand_in in ((_UUID, "(id)"), (_ADDRESS, "(address)"), (_PATH, "(path)")):
        value = pattern.sub(stand_in, value)
    for name in names:
        value = re.sub(rf"\b{re.escape(name)}\b", "(name)", value)
    return value


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
