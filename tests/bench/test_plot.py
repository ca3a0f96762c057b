"""The plot of ``bench MODEL``: which panels there are, and that the picture says what the rows say."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from microscale.bench.model import BenchRow
from microscale.bench.plot import draw, panels

ROWS = [
    BenchRow("pp512", 1, 0, 20_000, 100_000, 0, ()),
    BenchRow("pp2048", 1, 0, 60_000, 140_000, 0, ()),
    *(
        BenchRow(test, batch, depth, 600.0 * batch**0.8 / (1 + depth / 9e4), 1200.0 * batch**0.9, 0, ())
        for test in ("tg32", "tg128")
        for batch in (1, 8, 64)
        for depth in (128, 8192)
    ),
]


def test_a_panel_for_each_number_that_varies() -> None:
    found = panels(ROWS)
    assert [(panel.title, panel.x_label, len(panel.lines)) for panel in found] == [
        ("Decode", "sequences", 2),
        ("Decode", "tokens of context", 3),
        ("Prefill", "tokens of prompt", 1),
    ]
    assert [x for x, _, _ in found[0].lines[0].points] == [1, 8, 64]
    assert [panel.title for panel in panels(ROWS[:2])] == ["Prefill"]
    assert panels(ROWS[:1]) == []


def test_the_picture_is_well_formed_and_higher_is_faster() -> None:
    svg = draw(ROWS, 'x < y & "z"')
    root = ElementTree.fromstring(svg)
    assert root.findtext("{*}title") == 'x < y & "z"'
    for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
        heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
        if len(heights) == 3:  # over the batch, where more is faster
            assert heights == sorted(heights, reverse=True)
    assert len(re.findall("<circle", svg)) == 6 + 6 + 2
    assert "NaN" not in svg
    assert "Nothing to join" in draw(ROWS[:1], "one")
