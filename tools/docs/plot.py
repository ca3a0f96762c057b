"""The plot in README: which share of the roofline three engines reach, drawn from the tables of docs/benchmarks.md."""

from __future__ import annotations

import re
from html import escape
from typing import NamedTuple

from tools.docs.links import ROOT

SOURCE = ROOT / "docs/benchmarks.md"
TARGET = ROOT / "docs/plots/comparison.svg"
ENGINES = ("Microscale", "vLLM 0.26.0", "llama.cpp b10586")
COLUMNS = ("Microscale", "vLLM", "llama.cpp", "roofline")
WIDTH, LEFT, BAR, ROW, TOP = 600, 152, 17, 96, 64
SPAN = WIDTH - LEFT - 84
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #374151 } .title { font-size: 17px; font-weight: 600; fill: #111827 }
.group { font-weight: 600; fill: #111827 } .back { fill: #ffffff } .grid { stroke: #e5e7eb }
.e0 { fill: #1d6fb8 } .e1 { fill: #c2772b } .e2 { fill: #7c8594 }
@media (prefers-color-scheme: dark) {
  text { fill: #d1d5db } .title, .group { fill: #f9fafb } .back { fill: #161b22 } .grid { stroke: #374151 }
  .e0 { fill: #58a6ff } .e1 { fill: #e3a05a } .e2 { fill: #9aa4b2 } }
"""


class Group(NamedTuple):
    """One group of bars: its heading, and the row of a table in docs/benchmarks.md."""

    heading: str
    row: str


GROUPS = (
    Group("gpt-oss-20b, decode, 1 stream", "gpt-oss-20b, 1 stream, 128 tokens"),
    Group("gpt-oss-120b, decode, 1 stream", "gpt-oss-120b, 1 stream, 128 tokens"),
    Group("gpt-oss-120b, decode, 64 streams", "gpt-oss-120b, 64 streams, 128 tokens"),
    Group("gpt-oss-120b, a prompt of 8192 tokens", "gpt-oss-120b, 8192 tokens"),
)


def figures(page: str, group: Group) -> list[float]:
    """Tokens per second of each engine, then the roofline."""
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]
        if lines[0][1:5] != list(COLUMNS):
            continue
        for cells in lines:
            if cells[0] == group.row:
                return [_number(cell) for cell in cells[1:5]]
    raise ValueError(f"docs/benchmarks.md has no row {group.row!r}")


def _number(cell: str) -> float:
    """The first number in a cell; k stands for thousands."""
    match = re.search(r"([\d.,]+)(k?)", cell)
    if match is None:
        raise ValueError(f"no figure in {cell!r}")
    return float(match[1].replace(",", "")) * (1000 if match[2] else 1)


def drawn(page: str) -> str:
    height = TOP + ROW * len(GROUPS) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'role="img">',
        "<title>Share of the roofline on one H200: Microscale, vLLM and llama.cpp</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{height}" rx="8"/>',
        '<text class="title" x="16" y="30">One H200: tokens per second, and share of the roofline</text>',
        '<text x="16" y="50">Random weights in the real shapes, 2026-11-15; see docs/benchmarks.md</text>',
    ]
    for share in (0, 25, 50, 75, 100):
        x = LEFT + SPAN * share / 100
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - 28}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle">{share} %</text>')
    for i, group in enumerate(GROUPS):
        parts += _bars(group, figures(page, group), TOP + ROW * i)
    return "\n".join([*parts, "</svg>", ""])


def _bars(group: Group, values: list[float], top: float) -> list[str]:
    parts = [f'<text class="group" x="16" y="{top + 24}">{escape(group.heading)}</text>']
    *speeds, roofline = values
    for i, (engine, speed) in enumerate(zip(ENGINES, speeds, strict=True)):
        y = top + 34 + i * (BAR + 3)
        wide = SPAN * speed / roofline
        parts.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{engine}</text>')
        parts.append(f'<rect class="e{i}" x="{LEFT}" y="{y}" width="{wide:.1f}" height="{BAR}" rx="2"/>')
        parts.append(f'<text x="{LEFT + wide + 6:.1f}" y="{y + 13}">{speed:,.0f}</text>')
    return parts


def main() -> None:
    TARGET.write_text(drawn(SOURCE.read_text()))


if __name__ == "__main__":
    main()
