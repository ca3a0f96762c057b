"""Whether drafts are worth it, as text: a table for each number of sequences, in 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.markup import escape

from microscale.explain.speculative import COUNTED_AT, LENGTHS, Batch, DraftsReport
from microscale.explain.speed_text import WIDTH, rate_text
from microscale.formats import FORMATS
from microscale.planning.decision import Plan


def draft_lines(report: DraftsReport) -> Iterator[str]:
    costs = "costs nothing" if report.head is None else "its passes are in the steps"
    yield f"[bold]speculative decoding[/] by {escape(report.drafter.name)} ({costs}), after {report.context} tokens"
    if report.head is not None:
        yield from _head(report.head)
    for line in textwrap.wrap(
        "K drafts of each sequence are verified in one step. Acceptance: the chance of a drafted token after accepted "
        "ones. Break-even: the acceptance above which drafts are faster. At 2, 2.5 and 3: tokens per second if a step "
        "gives each sequence that many tokens.",
        WIDTH - 2,
    ):
        yield f"  {line}"
    for batch in report.batches:
        yield from _table(batch)
    if report.ranks > 1:
        more = "" if report.head is None else ", of which a head has one more for each pass"
        text = f"these steps are the time of one of {report.ranks} ranks, without its sums{more}"
        yield from textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")
    yield from _others(report)


def _head(plan: Plan) -> Iterator[str]:
    """The formats of the head's layers, and why some are not in the requested one."""
    by_format: dict[str, list[str]] = {}
    kept: list[str] = []
    for op, layer in plan.layers():
        decision = plan.of(op, layer)[0]
        if op in ("dense", "moe"):
            by_format.setdefault(decision.spec.weight_format, []).append(layer)
            kept += [f"{each.name} {each.reason}" for each in decision.rejected if each.name in FORMATS]
    formats = "; ".join(f"{', '.join(layers)} in {name}" for name, layers in by_format.items())
    for text in (f"the head: {formats}", *kept):
        lines = textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
        yield from (escape(line) for line in lines)


def _table(batch: Batch) -> Iterator[str]:
    size = "1 sequence" if batch.sequences == 1 else f"{batch.sequences} sequences"
    lengths = "".join(f"{f'at {length:g}':>8}" for length in LENGTHS)
    yield f"  {size + ':':<13} {'K':>3} {'step us':>9} {'x':>6} {'experts':>8} {'break-even':>10}{lengths}"
    for step in batch.steps:
        even = batch.break_even(step)
        acceptance = "" if not step.drafts else "never" if even is None else f"{even:.0%}"
        rates = (batch.tok_s(step, length) for length in LENGTHS)
        cells = "".join(f"{'' if rate is None else rate_text(rate):>8}" for rate in rates)
        if not step.drafts:
            cells = f"{rate_text(step.sequences / step.us * 1e6):>8} without drafts"
        experts = "" if step.experts is None else f"{step.experts:.1f}"
        ratio = batch.ratio(step)
        yield f"{step.drafts:>19} {step.us:>9.0f} {ratio:>6.2f} {experts:>8} {acceptance:>10}{cells}".rstrip()
    yield from _sentences(batch)


def _sentences(batch: Batch) -> Iterator[str]:
    step = batch.steps[min(COUNTED_AT, len(batch.steps) - 1)]
    even = batch.break_even(step)
    verdict = "is never faster" if even is None else f"is faster above an acceptance of {even:.0%}"
    yield f"    at K = {step.drafts} a step costs {batch.ratio(step):.2f} x; it {verdict}"
    parts = []
    for length in LENGTHS:
        best = batch.best(length)
        gain = f"K = {best.step.drafts}, {best.speedup:.2f} x" if best.step.drafts else "none"
        parts.append(f"{length:g} ({best.acceptance:.0%}): {gain}")
    text = f"a drafter with this many tokens a step at K = {COUNTED_AT} is best with: {'; '.join(parts)}"
    yield from textwrap.wrap(text, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 4)


def _others(report: DraftsReport) -> Iterator[str]:
    for row in report.published:
        drafts = "" if row.drafts is None else f" K = {row.drafts}"
        length = "" if row.acceptance_length is None else f", {row.acceptance_length:g} tokens a step"
        without = "" if row.tok_s_without is None else f" ({rate_text(row.tok_s_without)} without)"
        what = f"{row.engine}, {row.method}{drafts}, {row.batch} at once{length}"
        text = f"others: {what}: {rate_text(row.tok_s)}{without}; {row.date}, {row.source}"
        lines = textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
        yield from (f"[dim]{escape(line)}[/]" for line in lines)
