"""``microscale bench scale``: which clusters are simulated, and the table and the plot of what comes out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from microscale.bench.plot import Line, Panel, document
from microscale.bench.scale import Cluster, Outcome, Routing, simulate
from microscale.bench.scale_steps import Steps
from microscale.bench.scale_trace import make_requests
from microscale.errors import BadSetting
from microscale.integrations.prefix_routing import MAX_ENTRIES

HEAD = (
    f"{'replicas':>8} {'routing':<8} {'req/s':>8} {'tok/s':>10} {'first token, ms':>17} {'gap, ms':>13} {'cached':>7} "
    f"{'busy':>5} {'GPU h/Mtok':>10} {'$/Mtok':>7}\n{'':>36} {'p50 / p99':>17} {'p50 / p99':>13}"
)


@dataclass(frozen=True)
class Study:
    """What is varied, and what is held."""

    steps: Steps
    replicas: tuple[int, ...] = (1, 10, 100)
    routings: tuple[Routing, ...] = tuple(Routing)
    rates: tuple[float, ...] = (2.5,)
    """Requests a second for each replica."""
    seconds: float = 120.0
    warm_up_s: float = 400.0
    num_fronts: int = 1
    table_entries: int = MAX_ENTRIES
    seed: int = 0

    def check(self) -> None:
        if min(self.rates) <= 0 or self.seconds <= 0 or self.warm_up_s < 0:
            raise BadSetting("--rate and --seconds must be above 0, and --warm-up not below.")
        if min(self.replicas) < 1 or self.num_fronts < 1:
            raise BadSetting("--replicas and --fronts must be at least 1.")


def run(study: Study) -> Iterator[Outcome]:
    """One outcome after the other. All routings of one size get the same requests."""
    study.check()
    for num_replicas, rate in product(study.replicas, study.rates):
        requests = make_requests(rate * num_replicas, -study.warm_up_s, study.seconds, study.seed)
        if not (requests.arrival_s >= 0).any():
            raise BadSetting("No request arrives: raise --rate or --seconds.")
        for routing in study.routings:
            cluster = Cluster(study.steps, num_replicas, routing, study.num_fronts, study.table_entries, study.seed)
            yield simulate(cluster, requests)


def with_cache(steps: Steps, tokens: int | None) -> Steps:
    """The same engine with room for so many tokens."""
    return steps if tokens is None else replace(steps, cache_tokens=tokens)


def line(outcome: Outcome, price: float) -> str:
    """A row of the table; ``price`` of a GPU's hour."""
    first = f"{outcome.first_p50_s * 1e3:,.0f} / {outcome.first_p99_s * 1e3:,.0f}"
    gap = f"{outcome.gap_p50_s * 1e3:.1f} / {outcome.gap_p99_s * 1e3:.1f}"
    speed = f"{outcome.requests_per_s:>8,.1f} {outcome.output_tok_s:>10,.0f} {first:>17} {gap:>13}"
    shares = f"{outcome.cached:>7.1%} {outcome.busy:>5.0%}"
    cost = f"{outcome.gpu_hours_per_mtok:>10.3f} {price * outcome.gpu_hours_per_mtok:>7.2f}"
    return f"{outcome.num_replicas:>8} {outcome.routing:<8} {speed} {shares} {cost}"


def plot(outcomes: Sequence[Outcome], title: str) -> str:
    """First tokens and tokens a second over the number of replicas, a line for each routing."""
    sizes = sorted({outcome.num_replicas for outcome in outcomes})
    if len(sizes) < 2:
        return document([], title)

    def panel(name: str, unit: str, field: str, scale: float) -> Panel:
        lines = []
        for routing in dict.fromkeys(outcome.routing for outcome in outcomes):
            mine = {each.num_replicas: scale * getattr(each, field) for each in outcomes if each.routing == routing}
            lines.append(Line(routing, tuple((size, mine[size], None) for size in sizes if size in mine)))
        return Panel(name, "replicas", tuple(lines), unit)

    return document(
        [
            panel("First token, median", "ms", "first_p50_s", 1e3),
            panel("First token, p99", "ms", "first_p99_s", 1e3),
            panel("Answers", "tokens per second", "output_tok_s", 1.0),
        ],
        title,
    )
