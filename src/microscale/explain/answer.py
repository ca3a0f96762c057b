"""The answer of ``explain``: six lines on whether a model fits, how fast it will be, and what would change that."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.markup import escape

from microscale.engine.loading.fit import gib
from microscale.engine.loading.precisions import PrecisionOffer, choose, costs_text, speeds_text
from microscale.engine.predictions import Basis, Phase, Point
from microscale.explain.report import JoinedPoint, Report
from microscale.explain.speed_text import WIDTH, rate_cell, rate_text, sequences_text, time_text
from microscale.hardware.speeds_of_others import Published
from microscale.models.known_checkpoints import unlike_published
from microscale.planning.precision import EXACT

INDENT = 11
DRAFTS = "--speculative {} shows what drafts give"
"""``mtp`` for Qwen3.6, which alone has states and such a layer."""
BASES = {
    Basis.MEASURED: "measured on this kind of card",
    Basis.FITTED: "fitted from an H200's measurements",
    Basis.ESTIMATE: "roofline estimate without an interval",
}


def answer_lines(report: Report) -> Iterator[str]:
    """The lines, in rich's markup. A line that is longer than ``WIDTH`` continues below itself."""
    ranks = report.question.tensor_parallel_size
    cards = report.setup.gpu.name if ranks == 1 else f"{ranks} x {report.setup.gpu.name}"
    head = f"{report.question.model} on {cards}, precision {report.setup.precision}"
    yield from _wrapped(head, "", bold=True)
    for label, text in (
        ("fits", _fits(report)),
        ("speed", _speed(report)),
        ("precision", _precision(report)),
        ("to improve", _improve(report)),
        ("others", _others(report)),
    ):
        yield from _wrapped(text, label, bold=False)
    if (note := unlike_published(report.question.model)) is not None:
        yield from _wrapped(note, "note", bold=False)


def _wrapped(text: str, label: str, *, bold: bool) -> Iterator[str]:
    indent = INDENT if label else 0
    lines = textwrap.wrap(text, WIDTH - indent)
    marked = [f"[bold]{escape(line)}[/]" if bold else escape(line) for line in lines]
    yield f"[bold]{label:<{indent}}[/]{marked[0]}" if label else marked[0]
    yield from (" " * indent + line for line in marked[1:])


def _fits(report: Report) -> str:
    memory = report.memory
    if report.refusal is not None:
        return f"no: it needs {gib(memory.needed)} GiB, and {gib(memory.usable)} may be used ({memory.usable_because})"
    many = sequences_text(memory.max_sequences)
    need = f"{gib(memory.needed)} of {gib(memory.usable)} GiB"
    each = "" if report.question.tensor_parallel_size == 1 else " on each card"
    return f"yes: {need}{each}; up to {memory.max_context} tokens, or {many} of {memory.context}"


def _speed(report: Report) -> str:
    if report.refusal is not None:
        return "none, because it does not fit"
    if report.setup.gpu.is_cpu:
        return "not predicted for a CPU; --gpu NAME answers for a card"
    asked, (decode, prompt) = report.asked, _points(report)
    assert asked is not None
    assert decode is not None
    assert prompt is not None
    batch = "" if report.question.batch == 1 else f" for {sequences_text(report.question.batch)}"
    basis = BASES[asked.basis]
    interval = "" if asked.low is None else ", 90 % interval"
    if isinstance(decode, JoinedPoint):
        interval += f"; the range includes the published times of {report.sums_a_step} sums over the link"
    return (
        f"{rate_cell(decode)} tokens per second{batch} after {report.memory.context} tokens, first token of such a "
        f"prompt after {first_token(prompt)}: {basis}{interval}"
    )


def _points(report: Report) -> tuple[Point | JoinedPoint | None, Point | JoinedPoint | None]:
    """Decoding and the prompt of the question, with the sums of several ranks."""
    joined = {each.point: each for each in report.joined_points}
    decode, prompt = (None if point is None else joined.get(point, point) for point in (report.asked, report.prompt))
    return decode, prompt


def first_token(prompt: Point | JoinedPoint) -> str:
    """The time to the first token, with its interval."""
    tokens = prompt.context if isinstance(prompt, Point) else prompt.point.context
    middle = time_text(tokens / prompt.tok_s * 1e6)
    if prompt.low is None or prompt.high is None:
        return middle
    low, high = (tokens / rate * 1e6 for rate in (prompt.high, prompt.low))
    return f"{middle} ({time_text(low)} to {time_text(high)})"


def _precision(report: Report) -> str:
    """The best precision whose cost is known, then all of them."""
    if not report.offers:
        return f"{report.setup.precision}; precisions are compared for one rank only"
    if report.setup.gpu.is_cpu:
        return f"{report.setup.precision}; {costs_text(report.outline.name, report.offers)}"
    best, _ = choose(report.offers)
    auto = f"auto {'stays with' if best == EXACT.name else 'takes'} {best}"
    known = auto if report.chosen_because is not None else f"best of known cost: {best}"
    return f"{speeds_text(report.offers)}; {known}; {costs_text(report.outline.name, report.offers)}"


def _improve(report: Report) -> str:
    """What would make it fit, or faster."""
    if report.advice is not None:
        return report.advice
    if report.setup.gpu.is_cpu:
        return "a GPU: --gpu NAME says how fast"
    asked, own = report.asked, report.setup.precision.name
    drafts = DRAFTS.format("mtp" if report.memory.kv.states else "ngram")
    others = [offer for offer in report.offers if offer.tok_s is not None and offer.name != own]
    current = next((offer.tok_s for offer in report.offers if offer.name == own), None)
    if asked is None or current is None:
        return drafts
    faster: PrecisionOffer | None = max(others, key=lambda offer: offer.tok_s or 0.0, default=None)
    limit = f"the card allows at most {rate_text(asked.reachable)} in {own}"
    limit += f"; {drafts}"
    if faster is None or faster.tok_s is None or faster.tok_s <= current:
        return f"{own} is the fastest precision; {limit}"
    return f"--precision {faster.name} is {faster.tok_s / current - 1:.0%} faster; {limit}"


def _others(report: Report) -> str:
    row = best_published(report)
    return "no published figure known for this model on this card" if row is None else others_text(row)


def best_published(report: Report) -> Published | None:
    """The fastest decoding with the number of sequences that is nearest to the question's."""
    rows = [row for row in report.published if row.kind == Phase.DECODE]
    if not rows:
        return None
    nearest = min(abs(row.batch - report.question.batch) for row in rows)
    return max((row for row in rows if abs(row.batch - report.question.batch) == nearest), key=lambda row: row.tok_s)


def others_text(row: Published) -> str:
    many = "" if row.batch == 1 else f" for {sequences_text(row.batch)}"
    speed = f"{rate_text(row.tok_s)} tokens per second{many} after {row.context} tokens"
    return f"{row.engine}: {speed} ({row.date}, {row.source})"
