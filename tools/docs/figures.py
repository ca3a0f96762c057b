"""Writes what ``explain`` predicts into the pages that quote a speed.

A page holds a table between two comments. The first names a card and the rows, or, for the overview in README, the
cards. ``make docs-figures`` updates the tables, and a test compares them with ``explain``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from microscale import hardware
from microscale.engine.loading.fit import plan_and_size
from microscale.engine.loading.memory import Workload
from microscale.engine.predictions import Phase, predict
from microscale.explain import Question, explain
from microscale.explain.report import PAGE_SIZE, STEP_TOKENS
from microscale.models.families import LoadFormat, find_config
from microscale.models.outline import outline
from microscale.planning.ops import Activations
from microscale.planning.plan import Setup
from microscale.planning.precision import make_precision
from tools.docs.links import ROOT

BLOCK = re.compile(r"(<!-- explain (?P<card>\w+): (?P<rows>.+?) -->\n).*?(?=<!-- end of explain -->)", re.DOTALL)
FITS = re.compile(r"(<!-- fits: (?P<cards>.+?) -->\n).*?(?=<!-- end of fits -->)", re.DOTALL)
BATCHES = (1, 8, 64)
CONTEXT = 4096
PROMPT = 2048
GIB = 2**30
HEAD = (
    "\n| model, precision | memory, GiB | 1 sequence | 8 | 64 | prompt of 2048 | known by |\n"
    "| --- | --- | --- | --- | --- | --- | --- |\n"
)


# The columns of the overview, and what they are called there.
MODELS = {
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "gemma-4-26b-a4b-nvfp4": "Gemma 4 26B-A4B NVFP4",
    "qwen3.6-35b-a3b-nvfp4": "Qwen3.6 35B-A3B NVFP4",
}
PRECISIONS = ("exact", "balanced", "fast")


def pages() -> Iterator[Path]:
    """Pages with such a table."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text()
        if BLOCK.search(text) or FITS.search(text):
            yield path


def filled(text: str) -> str:
    """The page with its tables as ``explain`` predicts them now."""
    text = FITS.sub(lambda found: found[1] + overview(found["cards"].split(", ")), text)
    return BLOCK.sub(lambda found: found[1] + table(found["card"], found["rows"]), text)


def overview(cards: list[str]) -> str:
    """What one sequence gets from each model on each card, in the first precision that fits."""
    head = f"\n| card | {' | '.join(MODELS.values())} | known by |\n| --- |{' --- |' * len(MODELS)} --- |\n"
    return head + "".join(map(_overview_row, cards)) + "\n"


def _overview_row(card: str) -> str:
    cells: list[str] = []
    known: dict[str, list[str]] = {}
    for model, title in MODELS.items():
        found = (_fitting(card, model, precision) for precision in PRECISIONS)
        cell, basis = next((each for each in found if each is not None), ("does not fit", ""))
        cells.append(cell)
        known.setdefault(basis, []).append(title)
    known.pop("", None)
    main = max(known, key=lambda basis: len(known[basis]))
    others = (f"{basis}: {', '.join(titles)}" for basis, titles in known.items() if basis != main)
    gpu = hardware.known(card)
    name = re.sub(r"^NVIDIA (GeForce )?", "", gpu.name).replace("GB10", "DGX Spark (GB10)")
    return f"| {name}, {gpu.memory_bytes / GIB:.0f} GiB | {' | '.join(cells)} | {'; '.join([main, *others])} |\n"


def _fitting(card: str, model: str, precision: str) -> tuple[str, str] | None:
    """The cell of the overview and how its figure is known, unless the model does not fit.

    ``explain`` says the same, and would also compute what nobody reads here, ten times as long.
    """
    config = find_config(model, LoadFormat.DUMMY, {}, offline=True)
    shape = outline(model, config, Activations.BF16, PAGE_SIZE, CONTEXT)
    setup = Setup(hardware.known(card), Activations.BF16, precision=make_precision(precision, (), "auto", "auto"))
    plan, memory = plan_and_size(shape, setup, Workload(CONTEXT, step_tokens=STEP_TOKENS, page_size=PAGE_SIZE))
    if not memory.fits:
        return None
    point = predict(shape, plan, setup, Phase.DECODE, 1, CONTEXT, STEP_TOKENS)
    suffix = "" if precision == "exact" else f" in `{precision}`"
    return _speed(point.to_json()) + suffix, point.basis.value


def predicted(card: str, model: str, precision: str) -> Any:
    return explain(Question(model=model, gpu=card, precision=make_precision(precision, (), "auto", "auto")))


def table(card: str, rows: str) -> str:
    """``rows``: ``gpt-oss-20b exact, gpt-oss-20b fast``."""
    return HEAD + "".join(row(card, *each.split()) for each in rows.split(", ")) + "\n"


def row(card: str, model: str, precision: str) -> str:
    report = predicted(card, model, precision)
    data = report.to_json()
    needed = data["memory"]["bytes"]["total"] / GIB
    if report.refusal is not None:
        return f"| {model}, `{precision}` | {needed:.1f}: does not fit | | | | | |\n"
    decode = {each["batch"]: each for each in data["predicted"]["decode"] if each["context"] == CONTEXT}
    (prompt,) = (each for each in data["predicted"]["prefill"] if each["tokens"] == PROMPT)
    speeds = " | ".join(_speed(decode[batch]) if batch in decode else "does not fit" for batch in BATCHES)
    basis = decode[1]["basis"]
    return f"| {model}, `{precision}` | {needed:.1f} | {speeds} | {_speed(prompt)} | {basis} |\n"


def _speed(figure: dict[str, Any]) -> str:
    if figure.get("low") is None:  # an estimate
        return f"about {_short(figure['tok_s'])}"
    return f"{_short(figure['tok_s'])} ({_short(figure['low'])} to {_short(figure['high'])})"


def _short(value: float) -> str:
    """Three digits: a prediction is not more precise."""
    if value >= 10_000:
        return f"{value / 1000:.1f}k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def main() -> None:
    for path in pages():
        path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main()
