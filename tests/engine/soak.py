"""A million tokens through the engine with a model that costs nothing: does memory stay flat? Run by ``make soak``.

Requests of random lengths come and go, a tenth are aborted, pools are small enough that pages are evicted and requests
preempted all the time. Resident memory is read after a tenth of the tokens and at the end.
"""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Sequence

import torch

from microscale.engine.engine import Engine
from microscale.engine.graphs import GraphCounts
from microscale.engine.limits import Limits
from microscale.engine.pages import PagePool
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.sampling_state import Sampler
from microscale.engine.scheduler import Scheduler
from microscale.engine.work import Work
from microscale.kernels.dense.reference import summarise
from microscale.models.config import LayerKind
from microscale.planning.ops import Logits
from support.sampling import sampling_on_cpu

VOCAB = 32
SEQUENCES = 64
GROWTH = 16 << 20
"""Bytes that the process may grow by after the first tenth: what Python's allocator does not give back."""


class Flat:
    """All tokens are alike."""

    def prepare(self, *, stand_ins: bool) -> None: ...

    def idle(self) -> bool:
        return False

    def graphs(self) -> GraphCounts:
        return GraphCounts(0, 0, 0)

    def forward(self, schedule: Sequence[Work], tokens: torch.Tensor | None = None) -> Logits:
        return summarise(torch.zeros(sum(work.wants_logits for work in schedule), VOCAB))


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main(total: int) -> None:
    limits = Limits(page_size=16, window=128, max_num_seqs=SEQUENCES, max_num_batched_tokens=2048, max_model_len=4096)
    pools = {LayerKind.FULL: PagePool(1200), LayerKind.SLIDING: PagePool(900)}
    scheduler = Scheduler(pools, limits)
    cpu = torch.device("cpu")
    engine = Engine(Flat(), scheduler, Sampler(sampling_on_cpu(VOCAB), VOCAB, cpu), VOCAB)
    chooser = random.Random(0)
    shared = [chooser.randrange(VOCAB) for _ in range(512)]
    begin, produced, names = time.monotonic(), 0, 0
    alive: set[str] = set()
    early: int | None = None
    while produced < total:
        while len(alive) < 2 * SEQUENCES:
            own = [chooser.randrange(VOCAB) for _ in range(1 + chooser.randrange(200))]
            prompt = shared[: chooser.randrange(512)] + own
            params = SamplingParams(max_tokens=1 + chooser.randrange(600), temperature=0.0)
            engine.submit(Request(f"r{names}", prompt, params, cache_salt=chooser.choice(["", "b"])))
            alive.add(f"r{names}")
            names += 1
        if chooser.random() < 0.02:
            name = chooser.choice(sorted(alive))
            engine.abort(name)
            alive.discard(name)
        outputs = engine.step()
        produced += len(outputs)
        alive -= {output.request_id for output in outputs if output.finish}
        if early is None and produced > total // 10:
            early = resident()
    scheduler.check()
    late = resident()
    evicted = sum(pool.num_evicted for pool in pools.values())
    seconds = time.monotonic() - begin
    print(
        f"{produced} tokens of {names} requests in {seconds:.0f} s: {scheduler.num_preemptions} preemptions, {evicted} "
        f"pages evicted; {(early or 0) >> 20} MiB resident after a tenth, {late >> 20} at the end"
    )
    if late - (early or 0) > GROWTH:
        sys.exit("memory grew")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
