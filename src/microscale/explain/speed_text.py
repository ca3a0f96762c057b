"""The speeds of a report as text: a table of decoding, prompts, the ceiling, and what others publish."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from rich.markup import escape

from microscale.engine.predictions import Basis, Phase, Point
from microscale.engine.step_times import total
from microscale.explain.report import JoinedPoint, Report
from microscale.hardware.reachable_bandwidth import reach
from microscale.planning.plan import uncapturable

WIDTH = 80
CELL = 21
MOST_PUBLISHED = 3
BASES = {
    Basis.MEASURED: "measured: this model on this kind of card",
    Basis.FITTED: "fitted: kernels measured on an H200, adjusted to this card's rates",
    Basis.ESTIMATE: "estimate: bytes and operations divided by this card's rates",
}


def prediction_lines(report: Report) -> Iterator[str]:
    """Nothing for a model that does not fit."""
    asked = report.asked
    if asked is None:
        return
    decode = [point for point in report.points if point.kind is Phase.DECODE]
    interval = "" if asked.low is None else " (90 % interval)"
    yield ""
    yield f"[bold]predicted tokens per second[/]{interval}"
    yield f"  {BASES[asked.basis]}"
    alone = uncapturable(report.plan, report.question.batch)
    if alone is not None and not report.setup.gpu.is_cpu:
        text = f"decode runs without CUDA graphs, slower than this: {alone}"
        yield from (escape(line) for line in textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  "))
    yield from _decode_table("decode after", _columns(report, decode), {(p.context, p.batch): p for p in decode})
    yield from _bound(report, asked)
    for point in report.points:
        if point.kind is Phase.PREFILL:
            first = f"first token after {time_text(point.us)}"
            yield f"  prefill {point.context:<7}{rate_cell(point):>{CELL}}, ceiling {rate_text(point.ceiling)}; {first}"
    yield from _ranks(report)
    yield from _others(report)


def _decode_table(
    title: str, batches: list[int], points: Mapping[tuple[int, int], Point | JoinedPoint]
) -> Iterator[str]:
    """``points``: by context and batch."""
    yield "  " + f"{title:<13}" + "".join(f"{sequences_text(batch):>{CELL}}" for batch in batches)
    for context in sorted({context for context, _ in points}):
        row = [points.get((context, batch)) for batch in batches]
        cells = ("does not fit" if point is None else rate_cell(point) for point in row)
        yield f"  {context:<13}" + "".join(f"{cell:>{CELL}}" for cell in cells)


def _ranks(report: Report) -> Iterator[str]:
    """For a model on several ranks: the sums that the figures above leave out, and the figures with them."""
    ranks, sums = report.question.tensor_parallel_size, report.sums_a_step
    if ranks == 1:
        return
    text = f"these are the times of one rank. A step also has {sums} sums over {ranks} ranks"
    link = report.link
    if link is not None:
        text += f", which wait for the link ({link.what}; {link.source}, {link.date})"
    yield from (escape(line) for line in textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  "))
    if link is None:
        return
    decode = [each for each in report.joined_points if each.point.kind is Phase.DECODE]
    batches = _columns(report, [each.point for each in decode])
    yield from _decode_table("with sums", batches, {(each.point.context, each.point.batch): each for each in decode})
    waits = {each.point.batch: f"{each.wait.us:.0f}" for each in decode}
    yield f"  a sum takes {', '.join(waits[batch] for batch in batches)} us"
    for each in report.joined_points:
        if each.point.kind is Phase.PREFILL:
            yield f"  prefill {each.point.context:<7}{rate_cell(each):>{CELL}} with sums of {each.wait.us:.0f} us"


def _columns(report: Report, decode: list[Point]) -> list[int]:
    """Three batch sizes, including that of the question."""
    batches = sorted({point.batch for point in decode})
    asked = report.question.batch
    others = [batch for batch in batches if batch != asked]
    return batches if len(batches) <= 3 else sorted({*others[:1], *others[-1:], asked})


def sequences_text(batch: int) -> str:
    return "1 sequence" if batch == 1 else f"{batch} sequences"


def _bound(report: Report, asked: Point) -> Iterator[str]:
    """The ceiling of a step, and where its time goes."""
    gpu, step = report.setup.gpu, total(report.parts)
    read = reach(gpu)
    yield (
        f"  ceiling {rate_text(asked.ceiling)} for {sequences_text(asked.batch)} after {asked.context}: "
        f"{step.bytes / 1e9:.2f} GB at {gpu.bandwidth_gbs:.0f} GB/s"
    )
    if not gpu.is_cpu:
        known = f"{read.low:.0f} to {read.high:.0f}" if read.low < read.high else f"{read.gbs:.0f}"
        text = f"reading reaches {known} GB/s ({read.source}, {read.date}): {rate_text(asked.reachable)}"
        yield from (escape(line) for line in _indented(text))
    shares: dict[str, tuple[float, int]] = {}
    for part in report.parts:
        name = part.layer if part.layer.endswith("_attention") else part.layer.partition(".")[0]
        us, num_bytes = shares.get(name, (0.0, 0))
        shares[name] = (us + part.time.us, num_bytes + part.time.bytes)
    text = "share of a step: " + ", ".join(
        f"{name} {us / step.us:.0%} ({num_bytes / 1e9:.2f} GB)"
        for name, (us, num_bytes) in sorted(shares.items(), key=lambda item: -item[1][0])
    )
    yield from _indented(text)


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * 10, subsequent_indent=" " * 10)


def _others(report: Report) -> Iterator[str]:
    """Published figures of others, grouped by source; the JSON has each figure."""
    by_source: dict[tuple[str, str, str], list[str]] = {}
    for row in report.published:
        what = f"{row.batch} x {row.context}" if row.kind == "decode" else f"prefill {row.context}"
        by_source.setdefault((row.engine, row.source, row.date), []).append(f"{rate_text(row.tok_s)} ({what})")
    for (engine, source, date), figures in list(by_source.items())[:MOST_PUBLISHED]:
        text = f"others: {engine}, {date}: {', '.join(figures)}; {source}"
        lines = textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
        yield from (f"[dim]{escape(line)}[/]" for line in lines)


def rate_cell(point: Point | JoinedPoint) -> str:
    if point.low is None or point.high is None:
        return rate_text(point.tok_s)
    return f"{rate_text(point.tok_s)} ({rate_text(point.low)}-{rate_text(point.high)})"


def rate_text(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}"


def time_text(us: float) -> str:
    return f"{us / 1e6:.2f} s" if us >= 1e6 else f"{us / 1e3:.0f} ms"
