"""``bench serve --request-rate``: requests that arrive at random, as users do, at given average rates.

Times between arrivals have a gamma distribution, as in ``vllm bench serve``. A ``burstiness`` of 1 is a Poisson
process; lower values give bursts, higher ones a steadier flow. At the rate ``inf`` all requests are sent at once, which
measures throughput.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from microscale import settings
from microscale.bench.serve_client import BenchFailed, StreamTimes, exchange
from microscale.bench.serve_figures import Spread
from microscale.bench.serve_load import Requests
from microscale.bench.serve_process import HOST, BenchServer

WARM_UP = 8
"""Requests before the first rate."""


@dataclass(frozen=True)
class RatePlan:
    rates: tuple[float, ...]
    """Requests per second."""
    num_prompts: int = 200
    """At each rate."""
    input_len: int = 512
    output_len: int = 128
    range_ratio: float = 0.0
    """Lengths are uniform between ``1 - range_ratio`` and ``1 + range_ratio`` times these."""
    burstiness: float = 1.0
    temperature: float = 0.0

    @property
    def steps(self) -> int:
        """Steps of a progress bar."""
        return len(self.rates)

    def size(self, chooser: random.Random) -> tuple[int, int]:
        """Tokens of one prompt and of its answer."""
        low, high = 1 - self.range_ratio, 1 + self.range_ratio
        prompt, answer = (
            max(1, round(each * chooser.uniform(low, high))) for each in (self.input_len, self.output_len)
        )
        return prompt, answer

    def arrivals(self, rate: float, chooser: random.Random) -> Iterator[float]:
        """Seconds after the start."""
        at = 0.0
        for _ in range(self.num_prompts):
            yield at
            at += 0.0 if math.isinf(rate) else chooser.gammavariate(self.burstiness, 1 / (rate * self.burstiness))


@dataclass(frozen=True)
class RateFigures:
    """What a server does at one rate."""

    rate: float
    requests_s: float
    """Answers per second, from the first request to the end of the last answer."""
    output_tok_s: float
    first: Spread
    gaps: Spread
    """Between the tokens of one answer, over all answers."""
    client_busy: float
    """The share of a core that this client used, including parsing the answers at the end. Near 1, the client is the
    bottleneck."""


def measure(server: BenchServer, plan: RatePlan, seed: int, advance: Callable[[int], None]) -> list[RateFigures]:
    """Measure a server that has just become ready, at one rate after the other. An error includes the end of the
    server's log."""
    try:
        return list(_measure(server, plan, seed, advance))
    except (BenchFailed, OSError) as error:
        raise server.failed(str(error).rstrip(".")) from error


def _measure(server: BenchServer, plan: RatePlan, seed: int, advance: Callable[[int], None]) -> Iterator[RateFigures]:
    longest, most = math.ceil((plan.input_len + plan.output_len) * (1 + plan.range_ratio)), server.plan["max_model_len"]
    if longest > most:
        raise BenchFailed(f"The model takes {most} tokens, and a request may have {longest}; lower --input-len.")
    settings.allow_connections()
    requests = Requests(server, plan.temperature, seed)
    _run(server, replace(plan, num_prompts=WARM_UP), math.inf, requests)
    for rate in plan.rates:
        yield _run(server, plan, rate, requests)
        advance(1)


def _run(server: BenchServer, plan: RatePlan, rate: float, requests: Requests) -> RateFigures:
    chooser = random.Random(0)
    sizes = [plan.size(chooser) for _ in range(plan.num_prompts)]
    arrivals = list(plan.arrivals(rate, chooser))
    timed = [replace(requests.make(*size), at_s=at) for size, at in zip(sizes, arrivals, strict=True)]
    busy, began = time.process_time(), time.perf_counter()
    answers = exchange(HOST, server.port, timed, connected=False)
    share = (time.process_time() - busy) / (time.perf_counter() - began)
    requests.check(answers, sizes)
    return _figures(rate, answers, share)


def _figures(rate: float, answers: Sequence[StreamTimes], client_busy: float) -> RateFigures:
    took = max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
    tokens = sum(answer.completion_tokens for answer in answers)
    gaps = [gap for answer in answers for gap in answer.gaps()]
    first = Spread.of([answer.first_s for answer in answers])
    return RateFigures(rate, len(answers) / took, tokens / took, first, Spread.of(gaps or [0.0]), client_busy)


def table(plan: RatePlan, found: Sequence[RateFigures]) -> str:
    lines = [
        f"{plan.num_prompts} requests at each rate, {plan.input_len} + {plan.output_len} tokens"
        + (f" +- {plan.range_ratio:.0%}" if plan.range_ratio else ""),
        f"{'requests/s':>10} {'answered':>9} {'out tok/s':>10} {'first p50':>10} {'p99, ms':>9} {'gap p50':>8}"
        f" {'p99, ms':>8} {'client':>7}",
    ]
    for row in found:
        lines.append(
            f"{row.rate:>10g} {row.requests_s:>9.2f} {row.output_tok_s:>10.1f} {row.first.p50:>10.1f}"
            f" {row.first.p99:>9.1f} {row.gaps.p50:>8.2f} {row.gaps.p99:>8.2f} {row.client_busy:>7.0%}"
        )
    return "\n".join(lines)


def as_json(
    about: Mapping[str, object], plan: RatePlan, runs: Mapping[str, Sequence[RateFigures]]
) -> dict[str, object]:
    """A rate of ``inf`` is ``null``: JSON has no such number."""

    def finite(rate: float) -> float | None:
        return None if math.isinf(rate) else rate

    rows = {cache: [{**asdict(row), "rate": finite(row.rate)} for row in found] for cache, found in runs.items()}
    told = {**asdict(plan), "rates": [finite(rate) for rate in plan.rates]}
    return {**about, "plan": told, "runs": [{"cache": cache, "rates": found} for cache, found in rows.items()]}
