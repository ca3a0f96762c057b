"""The rows of ``microscale bench MODEL`` as one SVG: tokens per second over batch, context and prompt, with ceilings.

Both axes are logarithmic. A panel is drawn where there are two points to join.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from microscale.bench.model import BenchRow

WIDTH, HEIGHT = 420, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 44, 44
HEAD = 40
COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2")
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #374151 } .title { font-size: 15px; font-weight: 600; fill: #111827 }
.grid { stroke: #e5e7eb } .back { fill: #ffffff }
.line { fill: none; stroke-width: 2 } .ceiling { stroke-dasharray: 5 4 }
@media (prefers-color-scheme: dark) {
  text { fill: #d1d5db } .title { fill: #f9fafb } .grid { stroke: #374151 } .back { fill: #111827 } }
"""


@dataclass(frozen=True)
class Series:
    """Points of x, the measured value, and the ceiling if there is one."""

    label: str
    points: tuple[tuple[int, float, float | None], ...]


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    lines: tuple[Series, ...]
    unit: str = "tokens per second"


def panels(rows: Sequence[BenchRow]) -> list[Panel]:
    """The panels for which these rows have two points to join."""
    decode = [row for row in rows if row.test.startswith("tg")]
    # Take the longest of several lengths: its start-up share is the smallest.
    longest = max((int(row.test[2:]) for row in decode), default=0)
    decode = [row for row in decode if int(row.test[2:]) == longest]
    prompts = [row for row in rows if row.test.startswith("pp")]
    drawn = [
        _panel("Decode", "sequences", decode, lambda r: r.batch, lambda r: f"after {r.depth} tokens"),
        _panel("Decode", "tokens of context", decode, lambda r: r.depth, lambda r: _count(r.batch, "sequence")),
        _panel("Prefill", "tokens of prompt", prompts, lambda r: int(r.test[2:]), lambda r: "one prompt"),
    ]
    return [panel for panel in drawn if panel.lines]


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _panel(
    title: str, x_label: str, rows: Sequence[BenchRow], x: Callable[[BenchRow], int], name: Callable[[BenchRow], str]
) -> Panel:
    series: dict[str, dict[int, tuple[float, float]]] = {}
    for row in rows:
        if x(row) > 0:
            series.setdefault(name(row), {})[x(row)] = (row.tok_s, row.ceiling_tok_s)
    lines = [
        Series(label, tuple((at, *values) for at, values in sorted(points.items())))
        for label, points in series.items()
        if len(points) > 1
    ]
    return Panel(title, x_label, tuple(lines))


def draw(rows: Sequence[BenchRow], title: str) -> str:
    """An SVG document. If no two rows differ in exactly one number, it says so."""
    return document(panels(rows), title)


def document(drawn: Sequence[Panel], title: str) -> str:
    """The panels side by side."""
    width = WIDTH * max(1, len(drawn))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEAD + HEIGHT}" role="img" '
        f'viewBox="0 0 {width} {HEAD + HEIGHT}">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect class="back" width="{width}" height="{HEAD + HEIGHT}"/>',
        f'<text class="title" x="{LEFT}" y="26">{escape(title)}</text>',
    ]
    if not drawn:
        parts.append(
            f'<text x="{LEFT}" y="{HEAD + 40}">Nothing to join: measure two batches, contexts or prompts.</text>'
        )
    for index, panel in enumerate(drawn):
        parts.append(f'<g transform="translate({index * WIDTH} {HEAD})">{_draw_panel(panel)}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _draw_panel(panel: Panel) -> str:
    xs = sorted({x for line in panel.lines for x, _, _ in line.points})
    ys = [y for line in panel.lines for _, *both in line.points for y in both if y is not None]
    low, high = 10 ** math.floor(math.log10(min(ys))), 10 ** math.ceil(math.log10(max(ys)))
    across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def px(x: float) -> float:
        return LEFT + across * math.log(x / xs[0]) / math.log(xs[-1] / xs[0])

    def py(y: float) -> float:
        return TOP + up * (1 - math.log(y / low) / math.log(high / low))

    parts = [f'<text class="title" x="{LEFT}" y="20">{panel.title}, {panel.unit}</text>']
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        y = py(10.0**power)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_short(10**power)}</text>')
    for x in xs:
        parts.append(f'<text x="{px(x):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{_short(x)}</text>')
    parts.append(f'<text x="{LEFT + across / 2}" y="{HEIGHT - 8}" text-anchor="middle">{panel.x_label}</text>')
    for index, line in enumerate(panel.lines):
        colour = COLOURS[index % len(COLOURS)]
        for kind, column in (("line ceiling", 2), ("line", 1)):
            known = [(point[0], value) for point in line.points if (value := point[column]) is not None]
            path = " ".join(f"{px(x):.1f},{py(value):.1f}" for x, value in known)
            parts.append(f'<polyline class="{kind}" stroke="{colour}" points="{path}"/>')
        for x, measured, ceiling in line.points:
            of = "" if ceiling is None else f" of {ceiling:,.0f}"
            label = f"{line.label}, {x}: {measured:,.0f}{of}"
            where = f'cx="{px(x):.1f}" cy="{py(measured):.1f}"'
            parts.append(f'<circle {where} r="3.5" fill="{colour}"><title>{escape(label)}</title></circle>')
        has_ceiling = index == 0 and line.points[0][2] is not None
        label = f"{line.label} (dashed: ceiling)" if has_ceiling else line.label
        parts.append(f'<text x="{LEFT + 8}" y="{TOP + 6 + 16 * index}" style="fill: {colour}">{escape(label)}</text>')
    return "".join(parts)


def _short(number: float) -> str:
    return f"{number / 1000:g}k" if number >= 10_000 else f"{number:g}"
