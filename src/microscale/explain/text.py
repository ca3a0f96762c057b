"""A report as text for people: at most 80 columns, with rich's markup for terminals that show colour."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import replace

from rich.markup import escape

from microscale.engine.loading.fit import gib
from microscale.explain.report import Report, shared_memory
from microscale.explain.speculative_text import draft_lines
from microscale.explain.speed_text import WIDTH, prediction_lines
from microscale.hardware import GIB
from microscale.hardware.unified import PAGE_CACHE
from microscale.planning.decision import Decision, PathSpan, Span

MOST_NAMES = 3
"""Paths that are named with one reason; the JSON has all."""


def render(report: Report, reasons: bool = True) -> list[str]:
    """The tables behind the answer (``--why``), in rich's markup."""
    return [
        *_head(report),
        "",
        *_decisions(report, reasons),
        "",
        *_memory(report),
        *prediction_lines(report),
        *(() if report.drafts is None else ("", *draft_lines(report.drafts))),
    ]


def _head(report: Report) -> Iterator[str]:
    gpu = report.setup.gpu
    model = escape(report.outline.name)
    yield f"[bold]{model}[/] on [bold]{escape(gpu.name)}[/], precision {report.setup.precision}"
    if gpu.is_cpu:
        yield "This machine has no GPU: times only rank implementations. Use --gpu NAME for a card."
        return
    peaks = "/".join(f"{peak:.0f}" for peak in (gpu.peak.bf16, gpu.peak.fp8, gpu.peak.fp4) if peak)
    unit = "/".join(("BF16", "FP8", "FP4")[: peaks.count("/") + 1])
    memory = f"{gpu.memory_bytes / GIB:.0f} GiB{' unified' if gpu.unified else ''}"
    yield f"SM {gpu.capability}, {gpu.num_sms} SMs, {gpu.bandwidth_gbs:.0f} GB/s, {peaks} TFLOP/s {unit}, {memory}"


def _decisions(report: Report, reasons: bool) -> Iterator[str]:
    """A line per layer kind and span of batch sizes, then why the other implementations lost."""
    yield f"[bold]{'layer':<18}{'tokens':<10}{'format':<14}{'kernel':<16}{'us':>12} known[/]"
    for op, layer in report.plan.layers():
        spans = list(report.plan.spans(op, layer))
        for index, span in enumerate(spans):
            yield _line(report, layer if index == 0 else "", span)
        by_form = path_spans(spans)
        yield from _paths(by_form)
        if reasons:
            yield from _reasons(spans)
            yield from _path_reasons(by_form)


def _line(report: Report, layer: str, span: Span) -> str:
    first, last = span.decisions[0].predicted_us, span.decisions[-1].predicted_us
    times = _us(first) if len(span.decisions) == 1 else f"{_us(first)}-{_us(last)}"
    tuned = {decision.tuned for decision in span.decisions}
    basis = "mixed" if len(tuned) > 1 else "measured" if tuned.pop() else "sheet"
    formats = _formats(span.decisions[0])
    return f"{layer:<18}{span.tokens:<10}{formats + ' ':<14}[green]{span.chosen:<16}[/]{times:>12} {basis}"


def _formats(decision: Decision) -> str:
    """``weights x activations``; attention and small ops have no weights."""
    activations = getattr(decision.spec, "activations", "")
    weights = getattr(decision.spec, "weight_format", None)
    return f"{weights} x {activations}".replace("float32", "f32") if weights else str(activations)


def _us(us: float) -> str:
    return f"{us:.0f}" if us >= 99.5 else f"{us:.3g}"


def _reasons(spans: list[Span]) -> Iterator[str]:
    """Each rejected implementation with its reason; if the reason varies with tokens, at the first and last count."""
    by_name: dict[str, dict[int, str]] = {}
    for span in spans:
        for decision in span.decisions:
            for rejected in decision.rejected:
                by_name.setdefault(rejected.name, {})[decision.tokens] = rejected.reason
    for name, by_tokens in by_name.items():
        for line in textwrap.wrap(f"not {name}: {_by_size(by_tokens)}", WIDTH - 4, subsequent_indent="  "):
            yield f"    [dim]{escape(line)}[/]"


def path_spans(spans: list[Span]) -> dict[str, list[PathSpan]]:
    """The paths of a layer by form, if there is more than one path."""
    by_form: dict[str, list[PathSpan]] = {}
    for span in spans:
        for path in span.path_spans():
            same = by_form.setdefault(path.form, [])
            if same and same[-1].path is None and path.path is None:
                same[-1] = replace(same[-1], last=path.last)
            else:
                same.append(path)
    several = any(path.rejected for paths in by_form.values() for path in paths)
    return by_form if several else {}


def path_text(spans: list[PathSpan]) -> str:
    """``1-2: small batch, direct; 3-8: small batch, own list; 9-64: small batch, list; 65-: wgmma``."""
    parts = []
    for span in spans:
        # The last decision holds beyond its own batch size.
        last = "-" if span is spans[-1] else "" if span.first == span.last else f"-{span.last}"
        parts.append(f"{span.first}{last}: {span.path or 'apart'}")
    return "; ".join(parts)


def path_reasons(form: str, spans: list[PathSpan]) -> dict[str, str]:
    """Reason → the paths that it rules out. A reason that varies with tokens is given at the first and last count, one
    that varies with the kind of batch for the largest of that kind. The JSON has every span."""
    by_name: dict[str, dict[int, str]] = {}
    for span in spans[-1:] if form else spans:
        for rejected in span.rejected:
            by_name.setdefault(rejected.name, {})[span.first] = rejected.reason
    by_text: dict[str, list[str]] = {}
    for name, reasons in by_name.items():
        by_text.setdefault(_by_size(reasons), []).append(name)
    known = {*by_name, *(span.path for span in spans if span.path)}
    return {text: _together(names, known) for text, names in by_text.items()}


def _together(names: list[str], known: set[str]) -> str:
    """Join names; if all of a kind (``decode, …``) are there, only the kind."""

    def kind(name: str) -> str:
        own = name.partition(",")[0]
        alike = {other for other in known if other.partition(",")[0] == own}
        return own if len(alike) > 1 and alike <= set(names) else name

    kinds = list(dict.fromkeys(kind(name) for name in names))
    rest = f" and {len(kinds) - MOST_NAMES} others" if len(kinds) > MOST_NAMES + 1 else ""
    return " / ".join(kinds[:MOST_NAMES] if rest else kinds) + rest


def _by_size(reasons: dict[int, str]) -> str:
    sizes = sorted(reasons)
    if len(set(reasons.values())) == 1:
        return reasons[sizes[0]]
    return "; ".join(f"{reasons[size]} at {size}" for size in dict.fromkeys((sizes[0], sizes[-1])))


def _paths(by_form: dict[str, list[PathSpan]]) -> Iterator[str]:
    for form, spans in by_form.items():
        text = f"{form} {path_text(spans)}".strip()
        for line in textwrap.wrap(text, WIDTH - 4, subsequent_indent="  "):
            yield f"    {escape(line)}"


def _path_reasons(by_form: dict[str, list[PathSpan]]) -> Iterator[str]:
    for form, spans in by_form.items():
        for text, names in path_reasons(form, spans).items():
            reason = f"{f'{form}: ' if form else ''}not {names}: {text}"
            for line in textwrap.wrap(reason, WIDTH - 4, subsequent_indent="  "):
                yield f"    [dim]{escape(line)}[/]"


def _memory(report: Report) -> Iterator[str]:
    memory = report.memory
    kinds = ", ".join(f"{kind} {gib(size)}" for kind, size in memory.weights.items())
    kv = memory.needed - memory.fixed
    yield "[bold]memory, GiB[/]"
    rows = [
        ("weights", sum(memory.weights.values()), kinds),
        ("KV cache", kv, _kv_text(report)),
        ("activations", memory.activations, f"{memory.workload.step_tokens} tokens in one step"),
        ("graphs, runtime", memory.graphs + memory.runtime, "an estimate"),
        ("needed", memory.needed, f"of {gib(memory.usable)} that may be used ({memory.usable_because})"),
    ]
    for name, size, note in rows:
        lines = textwrap.wrap(note, WIDTH - 26)
        yield f"  {name:<15}{gib(size):>7}  {escape(lines[0])}"
        yield from (f"{'':<26}{escape(line)}" for line in lines[1:])
    if report.refusal is not None:
        yield from (f"[red]{escape(line)}[/]" for line in textwrap.wrap(f"does not fit: {report.refusal}", WIDTH))
        return
    batch = "one sequence" if memory.workload.sequences == 1 else f"{memory.workload.sequences} sequences"
    many = f"{memory.max_sequences} sequences of {memory.context} tokens"
    yield f"  fits: {memory.max_context} tokens for {batch}; {many}"
    for entry in shared_memory(memory):
        taken = f"{gib(entry.system.takes)} + {gib(PAGE_CACHE)} page cache"
        left = f"{entry.max_context} tokens; {entry.max_sequences} sequences of {memory.context}"
        yield f"  with {entry.system.name} ({taken}): {left if entry.max_context else 'does not fit'}"


def _kv_text(report: Report) -> str:
    memory = report.memory
    sequences = "" if memory.workload.sequences == 1 else f"{memory.workload.sequences} x "
    kind = "float32" if report.setup.kv_size == 4 else report.setup.precision.kv_format
    text = f"{sequences}{memory.context} tokens in {kind}: {memory.kv.full_per_token / 1024:.3g} KiB a token"
    if not memory.kv.sliding_per_position:
        return text
    return f"{text} in full layers, {memory.kv.per_sequence_sliding() / 2**20:.1f} MiB a sequence in sliding ones"
