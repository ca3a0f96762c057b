"""Many replicas on paper: tokens a second, latency and cost, by how requests are routed. Deterministic, and seeded.

Requests have the statistics of a public trace (``scale_trace``), steps take what was measured (``scale_steps``), and
the router is the one that runs on Ray (``integrations/prefix_routing``). docs/scale.md says what comes out, and what is
left out: networks, faults, and the processes in front of the replicas, whose cost is a sum and needs no simulation.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np

from microscale.bench.scale_replica import LEAST_S, Gaps, Job, Replica
from microscale.bench.scale_steps import Steps
from microscale.bench.scale_trace import SYSTEM_TOKENS, Requests
from microscale.integrations.prefix_routing import MAX_ENTRIES, PrefixPolicy, chain_length

BYTES_PER_TOKEN = 4.0
"""Of English, about; it decides how long a chain is."""
SYSTEM_CHAIN = tuple(range(-1, -1 - chain_length(SYSTEM_TOKENS * BYTES_PER_TOKEN), -1))
CHAIN_ROOM = 32
"""More than a chain is long: chains of different sessions and turns get different numbers."""


class Routing(StrEnum):
    RANDOM = "random"
    LOAD = "load"
    """The idler of two that are drawn, as Ray does by itself."""
    PREFIX = "prefix"


@dataclass(frozen=True)
class Cluster:
    """What is simulated."""

    steps: Steps
    num_replicas: int
    routing: Routing
    num_fronts: int = 1
    """Routers that know nothing of each other."""
    table_entries: int = MAX_ENTRIES
    """Of each."""
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What users and owners see. Of requests that arrived after the warm-up."""

    num_replicas: int
    routing: str
    requests_per_s: float
    output_tok_s: float
    first_p50_s: float
    first_p99_s: float
    gap_p50_s: float
    gap_p99_s: float
    cached: float
    """Share of prompt tokens that were in a cache."""
    busy: float
    """Share of the time that replicas computed."""
    busiest: float
    """Of the replica that computed most."""
    gpu_hours_per_mtok: float
    """For a million tokens of answers."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Seen(NamedTuple):
    """While requests arrived, after the warm-up."""

    seconds: float
    gaps: Gaps
    busy_s: list[float]
    """Of each replica."""


class Router:
    """Where a request goes; what is open is counted by each front for itself, as Ray's routers do."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rng = np.random.default_rng(cluster.seed + 1)
        self._policies = [PrefixPolicy(cluster.table_entries) for _ in range(cluster.num_fronts)]
        for policy, replica in product(self._policies, range(cluster.num_replicas)):
            policy.join(replica, replica)
        self._open = [[0] * cluster.num_replicas for _ in range(cluster.num_fronts)]
        self._array = [np.zeros(cluster.num_replicas, dtype=np.int64) for _ in range(cluster.num_fronts)]
        """The same, of which numpy finds the least."""
        self._chains: dict[int, tuple[int, ...]] = {}
        """Of each session's last prompt."""
        self._drawn = self._draws()
        self._sent: dict[int, tuple[int, int]] = {}

    def _draws(self) -> Iterator[tuple[int, int, int]]:
        """A front and two replicas, as often as wanted."""
        while True:
            size = 4096
            fronts = self._rng.integers(0, self._cluster.num_fronts, size)
            pairs = self._rng.integers(0, self._cluster.num_replicas, (size, 2))
            yield from zip(fronts.tolist(), pairs[:, 0].tolist(), pairs[:, 1].tolist(), strict=True)

    def send(self, job: Job, turn: int) -> int:
        front, one, other = next(self._drawn)
        loads = self._open[front]
        if self._cluster.routing is Routing.RANDOM:
            chosen = one
        elif self._cluster.routing is Routing.LOAD:
            chosen = one if loads[one] <= loads[other] else other
        else:
            chain = self._chain(job, turn)
            chosen = self._policies[front].choose(chain, loads, self._idlest(front, one))
            self._policies[front].routed(chain, chosen)
        self._count(front, chosen, 1)
        self._sent[job.number] = (front, chosen)
        return chosen

    def _idlest(self, front: int, drawn: int) -> int:
        """One of those with the fewest open requests: the one that was drawn, if it is among them."""
        loads = self._open[front]
        least = int(self._array[front].argmin())
        return drawn if loads[drawn] == loads[least] else least

    def _count(self, front: int, replica: int, change: int) -> None:
        self._open[front][replica] += change
        self._array[front][replica] += change

    def ended(self, job: Job) -> None:
        front, replica = self._sent.pop(job.number)
        self._count(front, replica, -1)

    def _chain(self, job: Job, turn: int) -> tuple[int, ...]:
        shared = chain_length(job.shared_len * BYTES_PER_TOKEN)
        begin = self._chains.get(job.session, SYSTEM_CHAIN)[:shared]
        begin = begin or SYSTEM_CHAIN[: chain_length(job.input_len * BYTES_PER_TOKEN)]
        first = (job.session * 64 + turn + 1) * CHAIN_ROOM
        length = chain_length(job.input_len * BYTES_PER_TOKEN)
        chain = (*begin, *range(first + len(begin), first + max(length, len(begin))))
        self._chains[job.session] = chain
        return chain


def simulate(cluster: Cluster, requests: Requests, measured_from_s: float = 0.0) -> Outcome:
    """Requests that arrive before ``measured_from_s`` run as the others do, and are not counted."""
    router = Router(cluster)
    gaps = Gaps()
    replicas = [Replica(cluster.steps, gaps) for _ in range(cluster.num_replicas)]
    jobs = _jobs(requests)
    begin = int(np.searchsorted(requests.arrival_s, measured_from_s))
    arrivals = iter(zip(jobs, requests.turn.tolist(), strict=True))
    left = _run(islice(arrivals, begin), [], router, replicas)
    gaps.counts[:] = 0
    for replica in replicas:
        replica.busy_s = 0.0
    left = _run(arrivals, left, router, replicas)
    seen = Seen(max(jobs[-1].arrival_s - measured_from_s, LEAST_S), gaps.copy(), [each.busy_s for each in replicas])
    # Those that have not begun yet are waited for, and add to nothing but their own first tokens.
    _advance(left, math.inf, router, replicas)
    return _outcome(cluster, jobs[begin:], seen, jobs[-1].arrival_s)


def _jobs(requests: Requests) -> list[Job]:
    columns = (requests.session, requests.arrival_s, requests.input_len, requests.shared_len, requests.output_len)
    return [Job(i, *row) for i, row in enumerate(zip(*(column.tolist() for column in columns), strict=True))]


def _run(
    arrivals: Iterator[tuple[Job, int]], heap: list[tuple[float, int]], router: Router, replicas: list[Replica]
) -> list[tuple[float, int]]:
    """Until the last of them has arrived; what is still to come.

    ``heap`` holds when runs of which replica end. A time that the replica has since changed is passed over.
    """
    for job, turn in arrivals:
        _advance(heap, job.arrival_s, router, replicas)
        number = router.send(job, turn)
        before = replicas[number].ends_s
        replicas[number].arrive(job, job.arrival_s)
        if replicas[number].ends_s != before:
            heapq.heappush(heap, (replicas[number].ends_s, number))
    return heap


def _advance(heap: list[tuple[float, int]], until_s: float, router: Router, replicas: list[Replica]) -> None:
    while heap and heap[0][0] < until_s:
        at, number = heapq.heappop(heap)
        replica = replicas[number]
        if at != replica.ends_s:
            continue
        for ended in replica.end_run():
            router.ended(ended)
        if replica.ends_s < math.inf:
            heapq.heappush(heap, (replica.ends_s, number))


def _outcome(cluster: Cluster, jobs: list[Job], seen: Seen, end_s: float) -> Outcome:
    first = np.array([job.first_s - job.arrival_s for job in jobs])
    begun = sum(job.first_s <= end_s for job in jobs)
    tokens = seen.gaps.counts.sum() + begun
    # Runs that began before, or end after, count where they end.
    busy = np.minimum(np.array(seen.busy_s) / seen.seconds, 1.0)
    return Outcome(
        cluster.num_replicas,
        cluster.routing.value,
        begun / seen.seconds,
        float(tokens) / seen.seconds,
        float(np.quantile(first, 0.5)),
        float(np.quantile(first, 0.99)),
        seen.gaps.quantile(0.5),
        seen.gaps.quantile(0.99),
        sum(job.hit for job in jobs) / sum(job.input_len for job in jobs),
        float(busy.mean()),
        float(busy.max()),
        cluster.num_replicas * seen.seconds / 3600 / float(tokens) * 1e6 if tokens else math.inf,
    )
