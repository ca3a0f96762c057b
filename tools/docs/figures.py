"""Writes what ``explain`` predicts for a card into the pages that quote a speed.

A page holds the table between two comments; the first names the card and the rows. ``make docs-figures`` updates the
tables, and a test compares them with ``explain``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from microscale.explain import Question, explain
from microscale.planning.precision import make_precision
from tools.docs.links import ROOT

BLOCK = re.compile(r"(<!-- explain (?P<card>\w+): (?P<rows>.+?) -->\n).*?(?=<!-- end of explain -->)", re.DOTALL)
BATCHES = (1, 8, 64)
CONTEXT = 4096
PROMPT = 2048
GIB = 2**30
HEAD = (
    "\n| model, precision | memory, GiB | 1 sequence | 8 | 64 | prompt of 2048 | known by |\n"
    "| --- | --- | --- | --- | --- | --- | --- |\n"
)


def pages() -> Iterator[Path]:
    """Pages with such a table."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        if BLOCK.search(path.read_text()):
            yield path


def filled(text: str) -> str:
    """The page with its tables as ``explain`` predicts them now."""
    return BLOCK.sub(lambda found: found[1] + table(found["card"], found["rows"]), text)


def table(card: str, rows: str) -> str:
    """``rows``: ``gpt-oss-20b exact, gpt-oss-20b fast``."""
    return HEAD + "".join(row(card, *each.split()) for each in rows.split(", ")) + "\n"


def row(card: str, model: str, precision: str) -> str:
    report = explain(Question(model=model, gpu=card, precision=make_precision(precision, (), "auto", "auto")))
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
