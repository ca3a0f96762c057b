"""``microscale bench kernels formats``: expert and dense layers in several weight formats, next to each other.

The kernels of a format should reach the same share of its own byte floor as those of the one that they were tuned for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from microscale_lab.kernel_bench import dense, moe
from microscale_lab.kernel_bench.rows import KernelRow

TOKENS = (1, 8, 64, 256, 1024, 8192)
FORMATS = ("mxfp4", "nvfp4")
MODEL = "256-experts"
SHAPES = dense.SHAPES[:2]
"""Without the lm_head, whose float32 logits of 8192 tokens are 7 GB."""


def run(
    model: str = MODEL, tokens: Sequence[int] = TOKENS, formats: Sequence[str] = FORMATS, repeats: int = 20
) -> Iterator[KernelRow]:
    for fmt in formats:
        yield from moe.run(model, tokens, weight_format=fmt, repeats=repeats)
    yield from dense.run(tokens, SHAPES, [name for fmt in formats for name in dense.formats(fmt)], repeats)


def side_by_side(rows: Sequence[KernelRow]) -> str:
    """A line for each case, with microseconds and share of the floor in each format, and the largest error."""
    cases: dict[str, dict[str, KernelRow]] = {}
    for row in rows:
        layer, tokens = row.case.rsplit(", ", 1)
        layer, fmt = layer.rsplit(" ", 1)
        cases.setdefault(f"{layer}, {tokens}", {})[fmt] = row
    names = list(dict.fromkeys(fmt for found in cases.values() for fmt in found))
    width = max(map(len, cases), default=4)
    lines = [f"{'case':<{width}}" + "".join(f" {name + ' us':>12} {'floor':>6}" for name in names) + f" {'error':>8}"]
    for case, found in cases.items():
        cells = "".join(f" {found[name].us:>12.1f} {found[name].percent_of_ceiling:>5.0f}%" for name in names)
        lines.append(f"{case:<{width}}{cells} {max(row.rms_error for row in found.values()):>8.1e}")
    return "\n".join(lines)
