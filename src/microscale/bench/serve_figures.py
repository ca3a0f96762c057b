"""The figures of ``bench serve``: as records, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

TEXTLESS = 1.05
"""Tokens per event above which the table adds a note."""

PARTS = {"server": "server process", "engine": "engine process", "load": "weights and kernels", "rest": "graphs, rest"}


@dataclass(frozen=True)
class Spread:
    """Percentiles, in milliseconds."""

    p50: float
    p99: float
    largest: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        ordered = sorted(1e3 * each for each in seconds)
        return cls(median(ordered), ordered[math.ceil(0.99 * len(ordered)) - 1], ordered[-1], len(ordered))


@dataclass(frozen=True)
class FirstToken:
    """First-token times of prompts of one size, sent one at a time."""

    prompt_tokens: int
    after_ready_ms: float
    """The first request of this size after the start."""
    steady: Spread


@dataclass(frozen=True)
class Slowest:
    """The first request that was slowest relative to the steady value of its size."""

    requests: int
    times_steady: float
    prompt_tokens: int
    ms: float


@dataclass(frozen=True)
class Burst:
    """Prompts that arrive at once."""

    prompts: int
    prompt_tokens: int
    first: Spread
    """First tokens of the first such burst."""
    again: Spread


@dataclass(frozen=True)
class GraphChanges:
    """CUDA graphs during a phase. Steps without a graph take longer, so gaps depend on them."""

    before: int
    """Graphs that were captured before the phase."""
    captured: int
    """Graphs that were captured during the phase."""
    waited_for: int
    """Steps that no captured graph could run; their kernels were launched one by one."""
    stand_ins: int
    """Steps that ran in a larger graph, because their own was not captured yet."""


@dataclass(frozen=True)
class Gaps:
    """Gaps between the tokens of streams that run together."""

    streams: int
    arrivals: int
    """Requests that arrived during the phase."""
    gaps: Spread
    tokens_per_event: float | None
    """Above 1, the server sent several tokens together or some had no text; None if the streams were cut off."""
    arrivals_first: Spread | None = None
    """First-token times of those requests."""
    graphs: GraphChanges | None = None
    """None if the server does not report them."""


@dataclass
class ServerFigures:
    """Everything that was measured on one server."""

    ready_s: float
    client_floor_ms: float
    """The time of the client and the loopback: send to first event, with a thread that answers at once."""
    http_floor_ms: float
    """A ``/ping`` of the server."""
    start_s: dict[str, float] = field(default_factory=dict)
    """The parts of ``ready_s``: server process, engine process, loading, the rest. Empty if the server does not report
    them."""
    first_tokens: list[FirstToken] = field(default_factory=list)
    slowest: Slowest | None = None
    burst: Burst | None = None
    gaps: list[Gaps] = field(default_factory=list)
    cached_tokens: int = 0
    """Prompt tokens from the prefix cache. Above 0, the first-token times are too good."""
    kernels_compiled_after_ready: int | None = None
    """None if the server does not count them."""


def table(cache: str, figures: ServerFigures) -> str:
    """One server's figures. Times are in milliseconds, except the time until ready."""
    return "\n".join(_lines(cache, figures))


def _lines(cache: str, figures: ServerFigures) -> Iterator[str]:
    parts = ", ".join(f"{PARTS.get(name, name)} {seconds:.2f}" for name, seconds in figures.start_s.items())
    yield f"kernel cache {cache}: ready after {figures.ready_s:.2f} s"
    if parts:
        yield f"of these {parts}"
    if figures.kernels_compiled_after_ready is not None:
        yield f"kernels compiled after ready: {figures.kernels_compiled_after_ready}"
    floor = f"{figures.client_floor_ms:.2f} ms of the client, {figures.http_floor_ms:.2f} ms of a /ping of the server"
    yield f"every first token includes a floor: {floor}"
    yield ""
    yield f"{'first token, ms':<26} {'p50':>9} {'p99':>9} {'largest':>9} {'after ready':>12} {'of p50':>8}"
    for row in figures.first_tokens:
        after = f"{row.after_ready_ms:>12.2f} {row.after_ready_ms / row.steady.p50:>7.1f}x"
        yield f"{f'prompt of {row.prompt_tokens}':<26} {_spread(row.steady)} {after}"
    if figures.slowest is not None:
        yield _slowest(figures.slowest)
    if figures.burst is not None:
        yield from _burst(figures.burst)
    yield ""
    yield f"{'gaps between tokens, ms':<26} {'p50':>9} {'p99':>9} {'largest':>9}"
    for gaps in figures.gaps:
        yield from _gaps(gaps)
    if figures.cached_tokens:
        yield f"{figures.cached_tokens} prompt tokens came from a prefix cache, so the first-token times are too good."


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
        note = f"   {gaps.tokens_per_event:.2f} tokens an event: some came together or have no text"
    yield f"{name:<26} {_spread(gaps.gaps)}{note}"
    if gaps.arrivals_first is not None:
        yield f"{'  their first tokens':<26} {_spread(gaps.arrivals_first)}"
    counts = gaps.graphs
    if counts is not None and (gaps.arrivals or counts.captured or counts.stand_ins):
        steps = f"{counts.stand_ins} steps in stand-ins, {counts.waited_for} without a graph"
        yield f"  graphs: {counts.before} before, {counts.captured} captured during it; {steps}"


def as_json(about: Mapping[str, object], runs: Mapping[str, ServerFigures]) -> dict[str, object]:
    return {**about, "runs": [{"cache": cache, **asdict(figures)} for cache, figures in runs.items()]}
