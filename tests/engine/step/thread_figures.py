"""What threads cost and gain: the embedded model on this CPU with all of torch's threads in every step, with one, and
by the step's size, beside a busy process and without. It measures, and is no test.

``python tests/engine/step/thread_figures.py 5`` takes the median of five rounds, in which the ways take turns.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from microscale.settings import limit_spinning

limit_spinning()

from microscale.engine.config import EngineConfig  # noqa: E402
from microscale.engine.generate import Generation  # noqa: E402  (torch reads the environment when it is imported)
from microscale.engine.loading.load import load  # noqa: E402
from microscale.engine.loading.prepare import prepare  # noqa: E402
from microscale.engine.sampling_params import SamplingParams  # noqa: E402
from microscale.engine.step.threads import all_threads  # noqa: E402
from microscale.models.families import AnyModel  # noqa: E402

NEW_TOKENS = 10
PROMPT = 1024
WAYS = {"all": all_threads(), "one": 1, "by size": None}


def decode(model: AnyModel, streams: int) -> float:
    """Tokens a second, after two steps that are not counted."""
    prompts = [[5 + index, 6, 7, 8] for index in range(streams)]
    generation = Generation(model, prompts, SamplingParams(max_tokens=NEW_TOKENS + 2, ignore_eos=True))
    generation.step()
    generation.step()
    count, start = 0, time.perf_counter()
    while generation.engine.has_work:
        count += generation.step()
    return count / (time.perf_counter() - start)


def prefill(model: AnyModel) -> float:
    prompt = [index % 4000 for index in range(PROMPT)]
    generation = Generation(model, [prompt], SamplingParams(max_tokens=1), prefix_caching=False)
    start = time.perf_counter()
    generation.run()
    return PROMPT / (time.perf_counter() - start)


CASES: dict[str, Callable[[AnyModel], float]] = {
    "decode, 8 streams": lambda model: decode(model, 8),
    "decode, 32 streams": lambda model: decode(model, 32),
    f"prefill of {PROMPT}": prefill,
}


@contextmanager
def beside(busy: bool) -> Iterator[None]:
    """In a session of its own: the kernel shares cores out by session."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) if busy else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def main(rounds: int) -> None:
    model = load(prepare(EngineConfig("demo", device="cpu")))
    found: dict[tuple[str, bool, str], list[float]] = {}
    for turn in range(rounds):
        for busy in (False, True):
            with beside(busy):
                for name, case in CASES.items():
                    for way in list(WAYS) if turn % 2 else reversed(WAYS):
                        model.ops.threads = WAYS[way]
                        found.setdefault((name, busy, way), []).append(case(model))
        print(f"round {turn + 1}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    for (name, busy, way), rates in found.items():
        low, high = min(rates), max(rates)
        where = "beside a busy process" if busy else "without"
        print(f"{name:<20} {where:<22} {way:<8} {statistics.median(rates):7.1f} tok/s ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main(int(sys.argv[1]))
