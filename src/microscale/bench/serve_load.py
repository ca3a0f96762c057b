"""What ``bench serve`` asks of a server, and what it finds.

The order matters, since the first requests after the start are measured: prompts one after the other, of mixed sizes;
the first burst; then what is steady. Every prompt is new text of an exact number of tokens; a reply that counted
another number, or ended early, is refused.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

from microscale.bench.serve_client import Answer, Ask, BenchFailed, client_floor_s, exchange, post, round_trip_s
from microscale.bench.serve_process import HOST, Server
from microscale.bench.serve_prompts import Prompts

PATH = "/v1/completions"
FIRST_TOKENS = 2
"""Tokens of a request whose first one is timed."""
ROUND_TRIPS = 20


@dataclass(frozen=True)
class Plan:
    """How much is asked."""

    prompt_lens: tuple[int, ...] = (16, 64, 128, 256, 512, 1024)
    repeats: int = 20
    """Requests of each size whose first token is timed."""
    first_requests: int = 100
    """After the start, of mixed sizes: ``prompt_lens``, and as many random ones between them twice."""
    burst: int = 64
    burst_len: int = 512
    streams: tuple[int, ...] = (1, 8, 64)
    stream_len: int = 128
    """Tokens of the prompts of streams."""
    stream_tokens: int = 256
    arrivals: int = 100
    arrival_s: float = 0.02
    arrival_tokens: int = 16
    running: int = 8
    """Streams that run while others arrive."""
    temperature: float = 0.0

    @property
    def steps(self) -> int:
        """Of a progress bar."""
        return self.first_requests + len(self.all_lens) * self.repeats + len(self.streams) + 3

    @property
    def all_lens(self) -> tuple[int, ...]:
        """The sizes of the table, and random ones between the smallest and the largest."""
        low, high = min(self.prompt_lens), max(self.prompt_lens)
        chooser = random.Random(0)
        between = {round(math.exp(chooser.uniform(math.log(low), math.log(high)))) for _ in self.prompt_lens * 2}
        return tuple(sorted({*self.prompt_lens, *between}))

    def fitting(self, max_model_len: int) -> Plan:
        """Without prompts that the model has no room for."""
        lens = tuple(length for length in self.prompt_lens if length + self.arrival_tokens <= max_model_len)
        longest = max(self.burst_len + FIRST_TOKENS, self.stream_len + self.stream_tokens)
        if not lens or longest > max_model_len:
            raise BenchFailed(f"The model takes {max_model_len} tokens, and the benchmark's streams need {longest}.")
        return replace(self, prompt_lens=lens)


QUICK = Plan(
    prompt_lens=(16, 64, 128),
    repeats=3,
    first_requests=12,
    burst=8,
    burst_len=64,
    streams=(1, 4),
    stream_len=16,
    stream_tokens=24,
    arrivals=8,
    arrival_tokens=4,
    running=2,
)


@dataclass(frozen=True)
class Spread:
    """Milliseconds of many of a kind."""

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
    """Of prompts of one size, sent alone."""

    prompt_tokens: int
    after_ready_ms: float
    """Of the first request of this size after the start."""
    steady: Spread


@dataclass(frozen=True)
class Slowest:
    """Among the first requests, the one that was slowest against the steady value of its size."""

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
class GraphCounts:
    """CUDA graphs of a server. Steps that were never captured take longer, so gaps depend on them."""

    before: int
    """When a phase began, from whatever phases came before it."""
    captured: int
    """Meanwhile."""
    waited_for: int
    """Steps that no captured graph could hold: their kernels were launched one by one."""
    stand_ins: int
    """Steps that ran in a larger graph than their own, which was not captured yet."""


@dataclass(frozen=True)
class Gaps:
    """Between the tokens of streams that run together."""

    streams: int
    arrivals: int
    """Requests that arrived meanwhile."""
    gaps: Spread
    tokens_per_event: float | None
    """Above 1 the server sent several tokens together, or some had no text; None where streams were hung up."""
    arrivals_first: Spread | None = None
    """First tokens of those that arrived."""
    graphs: GraphCounts | None = None
    """None where the server does not tell."""


@dataclass
class Found:
    """Everything that was measured on one server."""

    ready_s: float
    client_floor_ms: float
    """Send to first event of a thread that answers at once: what the client and the loopback take."""
    http_floor_ms: float
    """A ``/ping`` of the server, by the same clock."""
    start_s: dict[str, float] = field(default_factory=dict)
    """Of ``ready_s``: the server's own process, its engine's process, what that loaded, the rest of the engine's start.
    Nothing where the server does not tell."""
    first_tokens: list[FirstToken] = field(default_factory=list)
    slowest: Slowest | None = None
    burst: Burst | None = None
    gaps: list[Gaps] = field(default_factory=list)
    cached_tokens: int = 0
    """Of prompts, that a prefix cache had: 0, or first tokens are too good."""
    kernels_compiled_after_ready: int | None = None
    """As the server counts them; None where it does not."""


class Load:
    """Puts load on one server."""

    def __init__(self, server: Server, plan: Plan, seed: int, advance: Callable[[int], None]) -> None:
        self._server = server
        self._plan = plan.fitting(server.plan["max_model_len"])
        self._prompts = Prompts(lambda text: int(server.post("/tokenize", {"prompt": text})["count"]), seed)
        self._advance = advance
        self._cached = 0

    def run(self) -> Found:
        plan = self._plan
        firsts = self._first_requests()
        burst = self._burst()
        steady = {length: Spread.of(self._first_tokens([length] * plan.repeats)) for length in plan.all_lens}
        floors = (1e3 * client_floor_s(), 1e3 * self._http_floor_s())
        found = Found(self._server.ready_s, *floors, self._server.start_s)
        after_ready: dict[int, float] = {}
        for length, seconds in firsts:
            after_ready.setdefault(length, 1e3 * seconds)
        found.first_tokens = [FirstToken(n, after_ready[n], steady[n]) for n in plan.prompt_lens if n in after_ready]
        ratio, length, seconds = max((1e3 * s / steady[n].p50, n, s) for n, s in firsts)
        found.slowest = Slowest(len(firsts), ratio, length, 1e3 * seconds)
        found.burst = burst
        found.gaps = [self._counted(partial(self._streams, number)) for number in plan.streams]
        found.gaps.append(self._counted(self._arrivals))
        found.cached_tokens = self._cached
        [found.kernels_compiled_after_ready] = self._metrics("kernels_compiled_after_ready_total")
        return found

    def _metrics(self, *names: str) -> list[int | None]:
        """Numbers of the server's ``/metrics``; None for those that it does not have."""
        text = self._server.get("/metrics").decode()
        found = (re.search(rf"^\w+:{name}(?:{{.*}})? ([\d.e+]+)$", text, re.M) for name in names)
        return [None if each is None else int(float(each[1])) for each in found]

    def _counted(self, phase: Callable[[], Gaps]) -> Gaps:
        """What a phase finds, and the graphs that were captured before and during it."""
        names = ("cuda_graphs", "cuda_graphs_waited_for_total", "cuda_graph_stand_ins_total")
        before = self._metrics(*names)
        gaps = phase()
        both = zip(before, self._metrics(*names), strict=True)
        changes = [now - then for then, now in both if then is not None and now is not None]
        if before[0] is None or len(changes) < len(names):
            return gaps
        return replace(gaps, graphs=GraphCounts(before[0], *changes))

    def _first_requests(self) -> list[tuple[int, float]]:
        """Sizes and seconds to the first token. The sizes of the table come early, in a mixed order."""
        plan, chooser = self._plan, random.Random(1)
        lens: list[int] = []
        while len(lens) < plan.first_requests:
            lens += chooser.sample(plan.all_lens, len(plan.all_lens))
        lens = lens[: plan.first_requests]
        return list(zip(lens, self._first_tokens(lens), strict=True))

    def _first_tokens(self, lens: Sequence[int]) -> list[float]:
        """One after the other."""
        asks = [self._ask(length, FIRST_TOKENS) for length in lens]
        seconds = []
        for length, ask in zip(lens, asks, strict=True):
            seconds += [answer.first_s for answer in self._exchange([ask], [length], FIRST_TOKENS)]
            self._advance(1)
        return seconds

    def _burst(self) -> Burst:
        plan = self._plan
        spreads = []
        for _ in range(2):
            asks = [self._ask(plan.burst_len, FIRST_TOKENS) for _ in range(plan.burst)]
            answers = self._exchange(asks, [plan.burst_len] * plan.burst, FIRST_TOKENS)
            spreads.append(Spread.of([answer.first_s for answer in answers]))
            self._advance(1)
        return Burst(plan.burst, plan.burst_len, *spreads)

    def _streams(self, number: int) -> Gaps:
        """Gaps while all streams run: from the last one's first token to the first one's end."""
        plan = self._plan
        asks = [self._ask(plan.stream_len, plan.stream_tokens) for _ in range(number)]
        answers = self._exchange(asks, [plan.stream_len] * number, plan.stream_tokens)
        self._advance(1)
        since, until = max(a.first for a in answers), min(a.ended for a in answers)
        gaps = [gap for a in answers for gap in a.gaps(since, until)]
        if not gaps:
            raise BenchFailed(
                f"{number} streams of {plan.stream_tokens} tokens did not run together; raise --output-len."
            )
        tokens = sum(a.completion_tokens for a in answers) / max(1, sum(len(a.texts) for a in answers))
        return Gaps(number, 0, Spread.of(gaps), tokens)

    def _arrivals(self) -> Gaps:
        """Gaps of running streams while others arrive, until the last of these has its answer."""
        plan = self._plan
        room = self._server.plan["max_model_len"] - plan.stream_len
        running = [replace(self._ask(plan.stream_len, room), running=True) for _ in range(plan.running)]
        lens = [plan.prompt_lens[number % len(plan.prompt_lens)] for number in range(plan.arrivals)]
        others = [
            replace(self._ask(length, plan.arrival_tokens), at_s=number * plan.arrival_s)
            for number, length in enumerate(lens)
        ]
        answers = exchange(HOST, self._server.port, [*running, *others])
        self._advance(1)
        streams, arrived = answers[: plan.running], answers[plan.running :]
        self._check(arrived, lens, plan.arrival_tokens)
        since, until = min(a.sent for a in arrived), max(a.ended for a in arrived)
        if min(a.ended for a in streams) < until:
            raise BenchFailed("A stream reached the model's context length before all others had arrived.")
        gaps = [gap for a in streams for gap in a.gaps(since, until)]
        if not gaps:
            raise BenchFailed("The running streams showed no text while others arrived.")
        return Gaps(plan.running, plan.arrivals, Spread.of(gaps), None, Spread.of([a.first_s for a in arrived]))

    def _http_floor_s(self) -> float:
        return median(round_trip_s(HOST, self._server.port, "/ping") for _ in range(ROUND_TRIPS))

    def _ask(self, num_tokens: int, max_tokens: int) -> Ask:
        fields: dict[str, object] = {
            "prompt": self._prompts.make(num_tokens),
            "max_tokens": max_tokens,
            "temperature": self._plan.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Ask(post(HOST, self._server.port, PATH, fields))

    def _exchange(self, asks: Sequence[Ask], lens: Sequence[int], max_tokens: int) -> list[Answer]:
        answers = exchange(HOST, self._server.port, asks)
        self._check(answers, lens, max_tokens)
        return answers

    def _check(self, answers: Sequence[Answer], lens: Sequence[int], max_tokens: int) -> None:
        """Whether the server computed what was asked."""
        for answer, length in zip(answers, lens, strict=True):
            if (answer.prompt_tokens, answer.completion_tokens) != (length, max_tokens):
                raise BenchFailed(
                    f"The server counted {answer.prompt_tokens} tokens of a prompt and {answer.completion_tokens} of "
                    f"its answer, where {length} and {max_tokens} were asked for."
                )
            self._cached += answer.cached_tokens


def measure(server: Server, plan: Plan, seed: int, advance: Callable[[int], None]) -> Found:
    """Everything, on a server that has just become ready. What goes wrong is shown with the end of its log."""
    try:
        return Load(server, plan, seed, advance).run()
    except (BenchFailed, OSError) as error:
        raise server.failed(str(error).rstrip(".")) from error
