"""The load that ``bench serve`` puts on a server.

The order matters, because the first requests after the start are measured: single prompts of mixed sizes, the first
burst, and then the steady state. Every prompt is new random text of an exact number of tokens. A reply that counted
another number, or ended early, is an error.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from microscale.bench.serve_client import (
    BenchFailed,
    StreamTimes,
    TimedRequest,
    client_floor_s,
    exchange,
    post,
    round_trip_s,
)
from microscale.bench.serve_figures import Burst, FirstToken, Gaps, GraphChanges, ServerFigures, Slowest, Spread
from microscale.bench.serve_process import HOST, BenchServer

PATH = "/v1/completions"
FIRST_TOKENS = 2
"""Tokens of a request whose first one is timed."""
ROUND_TRIPS = 20
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TRIES = 200
"""Attempts to make a text of an exact number of tokens."""


@dataclass(frozen=True)
class LoadPlan:
    """The number and the sizes of requests."""

    prompt_lens: tuple[int, ...] = (16, 64, 128, 256, 512, 1024)
    repeats: int = 20
    """Requests of each size whose first token is timed."""
    first_requests: int = 100
    """Requests of mixed sizes right after the start: ``prompt_lens``, and twice as many random sizes between them."""
    burst: int = 64
    burst_len: int = 512
    streams: tuple[int, ...] = (1, 8, 64)
    stream_len: int = 128
    """Prompt tokens of each stream."""
    stream_tokens: int = 256
    arrivals: int = 100
    arrival_s: float = 0.02
    arrival_tokens: int = 16
    running: int = 8
    """Streams that run while others arrive."""
    temperature: float = 0.0

    @property
    def steps(self) -> int:
        """Steps of a progress bar."""
        return self.first_requests + len(self.all_lens) * self.repeats + len(self.streams) + 3

    @property
    def all_lens(self) -> tuple[int, ...]:
        """The sizes in the table, and random sizes between the smallest and the largest."""
        low, high = min(self.prompt_lens), max(self.prompt_lens)
        chooser = random.Random(0)
        between = {round(math.exp(chooser.uniform(math.log(low), math.log(high)))) for _ in self.prompt_lens * 2}
        return tuple(sorted({*self.prompt_lens, *between}))

    def fitting(self, max_model_len: int) -> LoadPlan:
        """The same plan without prompts that are too long for the model."""
        lens = tuple(length for length in self.prompt_lens if length + self.arrival_tokens <= max_model_len)
        longest = max(self.burst_len + FIRST_TOKENS, self.stream_len + self.stream_tokens)
        if not lens or longest > max_model_len:
            raise BenchFailed(f"The model takes {max_model_len} tokens, and the benchmark's streams need {longest}.")
        return replace(self, prompt_lens=lens)


QUICK = LoadPlan(
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


class Prompts:
    """Random texts of an exact number of tokens. They differ from the first letters on, so no prefix is cached.

    ``count`` returns the number of tokens of a text.
    """

    def __init__(self, count: Callable[[str], int], seed: int = 0) -> None:
        self._count = count
        self._chooser = random.Random(seed)
        self._letters_per_token = 1.0
        """The last observed ratio, so that the first attempt has about the right size."""

    def make(self, num_tokens: int) -> str:
        text = self._text(round(num_tokens * self._letters_per_token))
        for _ in range(TRIES):
            count = self._count(text)
            if count == num_tokens:
                return text
            self._letters_per_token = max(len(text), 1) / max(count, 1)
            text = self._nearer(text, num_tokens - count)
        raise BenchFailed(f"No text of exactly {num_tokens} tokens in {TRIES} attempts; the last one has {count}.")

    def _nearer(self, text: str, missing: int) -> str:
        """A text that is longer or shorter by about ``missing`` tokens.

        The last one or two tokens are single letters as separate words: a letter added to a word may join its token.
        """
        if missing < 0:
            return text[: min(-1, round(missing * self._letters_per_token))]
        if missing <= 2:
            return text + " " + self._chooser.choice(LETTERS)
        return text + self._text(round((missing - 1) * self._letters_per_token))

    def _text(self, length: int) -> str:
        text = ""
        while len(text) < length:
            text += "".join(self._chooser.choices(LETTERS, k=self._chooser.randint(2, 9))) + " "
        return text[:length]


class Requests:
    """Makes requests to one server, and checks what it computed."""

    def __init__(self, server: BenchServer, temperature: float, seed: int) -> None:
        self._port, self._temperature = server.port, temperature
        self._prompts = Prompts(lambda text: int(server.post("/tokenize", {"prompt": text})["count"]), seed)
        self.cached = 0
        """Prompt tokens that came from a prefix cache."""

    def make(self, num_tokens: int, max_tokens: int) -> TimedRequest:
        fields: dict[str, object] = {
            "prompt": self._prompts.make(num_tokens),
            "max_tokens": max_tokens,
            "temperature": self._temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return TimedRequest(post(HOST, self._port, PATH, fields))

    def check(self, answers: Sequence[StreamTimes], sizes: Iterable[tuple[int, int]]) -> None:
        """Fail unless the server computed what was requested: tokens of each prompt and of its answer."""
        for answer, (prompt, tokens) in zip(answers, sizes, strict=True):
            if (answer.prompt_tokens, answer.completion_tokens) != (prompt, tokens):
                raise BenchFailed(
                    f"The server counted {answer.prompt_tokens} prompt tokens and {answer.completion_tokens} "
                    f"answer tokens; {prompt} and {tokens} were requested."
                )
            self.cached += answer.cached_tokens


class LoadRun:
    """Puts load on one server and collects the figures."""

    def __init__(self, server: BenchServer, plan: LoadPlan, seed: int, advance: Callable[[int], None]) -> None:
        self._server = server
        self._plan = plan.fitting(server.plan["max_model_len"])
        self._requests = Requests(server, plan.temperature, seed)
        self._advance = advance

    def run(self) -> ServerFigures:
        plan = self._plan
        firsts = self._first_requests()
        burst = self._burst()
        steady = {length: Spread.of(self._first_tokens([length] * plan.repeats)) for length in plan.all_lens}
        floors = (1e3 * client_floor_s(), 1e3 * self._http_floor_s())
        figures = ServerFigures(self._server.ready_s, *floors, self._server.start_s)
        after_ready: dict[int, float] = {}
        for length, seconds in firsts:
            after_ready.setdefault(length, 1e3 * seconds)
        figures.first_tokens = [FirstToken(n, after_ready[n], steady[n]) for n in plan.prompt_lens if n in after_ready]
        ratio, length, seconds = max((1e3 * s / steady[n].p50, n, s) for n, s in firsts)
        figures.slowest = Slowest(len(firsts), ratio, length, 1e3 * seconds)
        figures.burst = burst
        figures.gaps = [self._counted(partial(self._streams, number)) for number in plan.streams]
        figures.gaps.append(self._counted(self._arrivals))
        figures.cached_tokens = self._requests.cached
        [figures.kernels_compiled_after_ready] = self._metrics("kernels_compiled_after_ready_total")
        return figures

    def _metrics(self, *names: str) -> list[int | None]:
        """Numbers from the server's ``/metrics``; None for those that it does not have."""
        text = self._server.get("/metrics").decode()
        matches = (re.search(rf"^\w+:{name}(?:{{.*}})? ([\d.e+]+)$", text, re.M) for name in names)
        return [None if each is None else int(float(each[1])) for each in matches]

    def _counted(self, phase: Callable[[], Gaps]) -> Gaps:
        """The figures of a phase, with the graphs that were captured before and during it."""
        names = ("cuda_graphs", "cuda_graphs_waited_for_total", "cuda_graph_stand_ins_total")
        before = self._metrics(*names)
        gaps = phase()
        both = zip(before, self._metrics(*names), strict=True)
        changes = [now - then for then, now in both if then is not None and now is not None]
        if before[0] is None or len(changes) < len(names):
            return gaps
        return replace(gaps, graphs=GraphChanges(before[0], *changes))

    def _first_requests(self) -> list[tuple[int, float]]:
        """Sizes and seconds to the first token. All sizes come early, in a mixed order."""
        plan, chooser = self._plan, random.Random(1)
        lens: list[int] = []
        while len(lens) < plan.first_requests:
            lens += chooser.sample(plan.all_lens, len(plan.all_lens))
        lens = lens[: plan.first_requests]
        return list(zip(lens, self._first_tokens(lens), strict=True))

    def _first_tokens(self, lens: Sequence[int]) -> list[float]:
        """Seconds to the first token of prompts that are sent one after the other."""
        requests = [self._requests.make(length, FIRST_TOKENS) for length in lens]
        seconds = []
        for length, request in zip(lens, requests, strict=True):
            seconds += [answer.first_s for answer in self._exchange([request], [length], FIRST_TOKENS)]
            self._advance(1)
        return seconds

    def _burst(self) -> Burst:
        plan = self._plan
        spreads = []
        for _ in range(2):
            requests = [self._requests.make(plan.burst_len, FIRST_TOKENS) for _ in range(plan.burst)]
            answers = self._exchange(requests, [plan.burst_len] * plan.burst, FIRST_TOKENS)
            spreads.append(Spread.of([answer.first_s for answer in answers]))
            self._advance(1)
        return Burst(plan.burst, plan.burst_len, *spreads)

    def _streams(self, number: int) -> Gaps:
        """Gaps while all streams run: from the last stream's first token to the first stream's end."""
        plan = self._plan
        requests = [self._requests.make(plan.stream_len, plan.stream_tokens) for _ in range(number)]
        answers = self._exchange(requests, [plan.stream_len] * number, plan.stream_tokens)
        self._advance(1)
        since, until = max(a.first for a in answers), min(a.ended for a in answers)
        gaps = [gap for a in answers for gap in a.gaps(since, until)]
        if not gaps:
            raise BenchFailed(
                f"{number} streams of {plan.stream_tokens} tokens did not run at the same time; raise --output-len."
            )
        tokens = sum(a.completion_tokens for a in answers) / max(1, sum(len(a.texts) for a in answers))
        return Gaps(number, 0, Spread.of(gaps), tokens)

    def _arrivals(self) -> Gaps:
        """Gaps of running streams while others arrive, until the last of those has its answer."""
        plan = self._plan
        room = self._server.plan["max_model_len"] - plan.stream_len
        running = [replace(self._requests.make(plan.stream_len, room), running=True) for _ in range(plan.running)]
        lens = [plan.prompt_lens[number % len(plan.prompt_lens)] for number in range(plan.arrivals)]
        others = [
            replace(self._requests.make(length, plan.arrival_tokens), at_s=number * plan.arrival_s)
            for number, length in enumerate(lens)
        ]
        answers = exchange(HOST, self._server.port, [*running, *others])
        self._advance(1)
        streams, arrived = answers[: plan.running], answers[plan.running :]
        self._requests.check(arrived, [(length, plan.arrival_tokens) for length in lens])
        since, until = min(a.sent for a in arrived), max(a.ended for a in arrived)
        if min(a.ended for a in streams) < until:
            raise BenchFailed("A stream reached the model's context length before all others had arrived.")
        gaps = [gap for a in streams for gap in a.gaps(since, until)]
        if not gaps:
            raise BenchFailed("The running streams had no text while others arrived.")
        return Gaps(plan.running, plan.arrivals, Spread.of(gaps), None, Spread.of([a.first_s for a in arrived]))

    def _http_floor_s(self) -> float:
        return median(round_trip_s(HOST, self._server.port, "/ping") for _ in range(ROUND_TRIPS))

    def _exchange(self, requests: Sequence[TimedRequest], lens: Sequence[int], max_tokens: int) -> list[StreamTimes]:
        answers = exchange(HOST, self._server.port, requests)
        self._requests.check(answers, [(length, max_tokens) for length in lens])
        return answers


def measure(server: BenchServer, plan: LoadPlan, seed: int, advance: Callable[[int], None]) -> ServerFigures:
    """Measure a server that has just become ready. An error includes the end of the server's log."""
    try:
        return LoadRun(server, plan, seed, advance).run()
    except (BenchFailed, OSError) as error:
        raise server.failed(str(error).rstrip(".")) from error
