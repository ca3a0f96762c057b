"""What was measured, shown: a table for the terminal, JSON for programs, Markdown for ``docs/quality.md``."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import asdict

from microscale.engine.quality_costs import QualityCost
from microscale.planning.precision import PRECISIONS
from microscale_lab.quality.run import REFERENCE, ChoiceResult

BAR = 20
EIGHTHS = " ▏▎▍▌▋▊▉█"


def table(rows: Sequence[ChoiceResult]) -> str:
    """Bars show the divergence on a logarithmic scale: from 1e-6 nats (empty) to 1 (full)."""
    width = max(len(row.choice) for row in rows)
    lines = [f"{'choice':<{width}} {'accuracy':>9} {'loss':>8} {'KL':>9} {'top-1':>7}  divergence"]
    for row in rows:
        if row.distance is None or row.accuracy is None:
            lines.append(f"{row.choice:<{width}} not here: {short_reason(row)}")
            continue
        away = row.distance
        figures = f"{100 * row.accuracy:>8.1f}% {away.loss:>8.4f} {away.kl:>9.2e} {100 * away.top1:>6.2f}%"
        lines.append(f"{row.choice:<{width}} {figures}  {bar(away.kl)}".rstrip())
    return "\n".join(lines)


def bar(kl: float) -> str:
    """A bar of at most ``BAR`` characters."""
    share = min(1.0, max(0.0, 1 + math.log10(max(kl, 1e-12)) / 6))
    eighths = round(share * BAR * 8)
    return EIGHTHS[-1] * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def as_json(rows: Sequence[ChoiceResult]) -> list[dict[str, object]]:
    return [asdict(row) for row in rows]


def as_markdown(rows: Sequence[ChoiceResult], title: str, circumstances: str) -> str:
    """A section: every choice in a table, the plans' accuracy by task in another, and what could not run."""
    ran = [row for row in rows if row.distance is not None and row.accuracy is not None]
    parts = [f"## {title}", "", circumstances, ""]
    parts += ["| choice | right answers | loss | KL from float32 | same likeliest token |", "| --- |" + " ---: |" * 4]
    for row in ran:
        assert row.distance is not None
        assert row.accuracy is not None
        away = row.distance
        kl = "0" if row.choice == REFERENCE else f"{away.kl:.1e}"
        figures = (f"{100 * row.accuracy:.1f} %", f"{away.loss:.4f}", kl, f"{100 * away.top1:.2f} %")
        parts.append(f"| `{row.choice}` | {' | '.join(figures)} |")
    plans = [row for row in ran if row.choice in (REFERENCE, *PRECISIONS)]
    parts += ["", "Right answers by task:", "", f"| task | {' | '.join(f'`{row.choice}`' for row in plans)} |"]
    parts.append("| --- |" + " ---: |" * len(plans))
    for task in plans[0].by_task:
        parts.append(f"| {task} | {' | '.join(f'{100 * row.by_task[task]:.0f} %' for row in plans)} |")
    away_rows = [f"- `{row.choice}` did not run: {short_reason(row)}." for row in rows if row.reason is not None]
    return "\n".join([*parts, "", *away_rows]).rstrip() + "\n"


def as_costs(rows: Sequence[ChoiceResult], model: str, device: str, prompts: int, on_gpu: bool) -> list[QualityCost]:
    """What ``--precision auto`` and ``explain`` need to know: the divergence of each precision, in two digits."""
    today = str(datetime.date.today())
    return [
        QualityCost(model, row.choice, float(f"{row.distance.kl:.1e}"), device, on_gpu, prompts, today)
        for row in rows
        if row.choice in PRECISIONS and row.distance is not None
    ]


def short_reason(row: ChoiceResult) -> str:
    """The whole reason, with every implementation's, is in the JSON."""
    return (row.reason or "").split(";")[0].rstrip(".")
