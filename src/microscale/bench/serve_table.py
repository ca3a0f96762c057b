"""The figures of ``bench serve`` as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from microscale.bench.serve_load import Burst, Found, Gaps, Slowest, Spread

TEXTLESS = 1.05
"""Tokens per event from which the table says that gaps are not those of single tokens."""

PARTS = {"server": "server process", "engine": "engine process", "load": "weights and kernels", "rest": "graphs, rest"}


def table(cache: str, found: Found) -> str:
    """One server's figures. All times are milliseconds but those to ready."""
    return "\n".join(_lines(cache, found))


def _lines(cache: str, found: Found) -> Iterator[str]:
    parts = ", ".join(f"{PARTS.get(name, name)} {seconds:.2f}" for name, seconds in found.start_s.items())
    yield f"kernel cache {cache}: ready after {found.ready_s:.2f} s"
    if parts:
        yield f"of these {parts}"
    if found.kernels_compiled_after_ready is not None:
        yield f"kernels compiled after ready: {found.kernels_compiled_after_ready}"
    floor = f"{found.client_floor_ms:.2f} ms are the client's own, {found.http_floor_ms:.2f} ms a /ping of the server"
    yield f"every first token includes a floor: {floor}"
    yield ""
    yield f"{'first token, ms':<26} {'p50':>9} {'p99':>9} {'largest':>9} {'after ready':>12} {'of p50':>8}"
    for row in found.first_tokens:
        after = f"{row.after_ready_ms:>12.2f} {row.after_ready_ms / row.steady.p50:>7.1f}x"
        yield f"{f'prompt of {row.prompt_tokens}':<26} {_spread(row.steady)} {after}"
    if found.slowest is not None:
        yield _slowest(found.slowest)
    if found.burst is not None:
        yield from _burst(found.burst)
    yield ""
    yield f"{'gaps between tokens, ms':<26} {'p50':>9} {'p99':>9} {'largest':>9}"
    for gaps in found.gaps:
        yield from _gaps(gaps)
    if found.cached_tokens:
        yield f"{found.cached_tokens} tokens of prompts came from a prefix cache: first tokens are too good."


def _spread(spread: Spread) -> str:
    return f"{spread.p50:>9.2f} {spread.p99:>9.2f} {spread.largest:>9.2f}"


def _slowest(slowest: Slowest) -> str:
    return (
        f"slowest of the first {slowest.requests} requests after ready: {slowest.times_steady:.2f}x the p50 of its "
        f"size (prompt of {slowest.prompt_tokens}, {slowest.ms:.2f} ms)"
    )


def _burst(burst: Burst) -> Iterator[str]:
    name = f"{burst.prompts} of {burst.prompt_tokens} at once"
    yield f"{f'{name}, first':<26} {_spread(burst.first)}"
    yield f"{f'{name}, again':<26} {_spread(burst.again)}"


def _gaps(gaps: Gaps) -> Iterator[str]:
    name = f"{gaps.streams} stream{'s' * (gaps.streams > 1)}"
    if gaps.arrivals:
        name += f", {gaps.arrivals} arrive"
    note = ""
    if gaps.tokens_per_event is not None and gaps.tokens_per_event > TEXTLESS:
        note = f"   {gaps.tokens_per_event:.2f} tokens an event: some came together, or show no text"
    yield f"{name:<26} {_spread(gaps.gaps)}{note}"
    if gaps.arrivals_first is not None:
        yield f"{'  their first tokens':<26} {_spread(gaps.arrivals_first)}"
    counts = gaps.graphs
    if counts is not None and (gaps.arrivals or counts.captured or counts.stand_ins):
        steps = f"{counts.stand_ins} steps in stand-ins, {counts.waited_for} without a graph"
        yield f"  graphs: {counts.before} before, {counts.captured} captured meanwhile; {steps}"


def as_json(about: Mapping[str, object], runs: Mapping[str, Found]) -> dict[str, object]:
    return {**about, "runs": [{"cache": cache, **asdict(found)} for cache, found in runs.items()]}
