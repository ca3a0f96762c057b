"""``microscale profile MODEL``: where one decoding step and one prompt go, part by part.

The bound layers of a loaded model are wrapped in named ranges, and a step runs under torch's profiler as single
launches: a captured graph has no ranges. The time of a part is what its kernels took on the GPU (on a CPU, the calls
themselves). The same step is also timed as the engine runs it, with graphs and without a profiler; what that takes
beyond the sum of the parts is the host's share, *host gap*.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from microscale.backends.plan import Setup
from microscale.bench.model import Case, make_engine
from microscale.engine.engine import Engine
from microscale.engine.request import Request
from microscale.engine.sampler import SamplingParams
from microscale.explain.predict import decode_parts, prompt_parts
from microscale.models.gpt_oss import GptOss
from microscale.models.outline import Outline

PREFIX = "microscale: "
GAP = "host gap"
SMALL = {
    "rms_norm": "norms",
    "add_rms_norm": "norms",
    "rope_and_write_kv": "rope and KV write",
    "add_norm_route": "norm and router",
    "route": "norm and router",
}
"""Methods of the small ops → the part that they belong to."""
STEPS = 8
"""Decoding steps that are averaged."""


class Ranged:
    """A bound op whose calls stand in a named range."""

    def __init__(self, inner: Any, name: str, methods: dict[str, str] | None = None) -> None:
        self._inner = inner
        self._name = name
        self._methods = methods or {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        with record_function(PREFIX + self._name):
            return self._inner(*args, **options)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        part = self._methods.get(name)
        if part is None:
            return found

        def ranged(*args: Any, **options: Any) -> Any:
            with record_function(PREFIX + part):
                return found(*args, **options)

        return ranged


def name_parts(model: GptOss) -> None:
    """Wrap every bound op of the model. For good: a model that was profiled serves nothing else."""
    target: Any = model
    target.embed = Ranged(model.embed, "embed")
    for layer in target.layers:
        layer.qkv = Ranged(layer.qkv, "qkv")
        layer.o = Ranged(layer.o, "o")
        layer.experts = Ranged(layer.experts, "experts")
        layer.attention = Ranged(layer.attention, layer.kind.value)
        layer.small = Ranged(layer.small, "small", SMALL)
    target.small = Ranged(model.small, "small", SMALL)
    target.lm_head = Ranged(model.lm_head, "lm_head", {"logits": "lm_head"})
    target.sampling = Ranged(model.sampling, "sampling")


@dataclass(frozen=True)
class Part:
    """One line: what a part takes in one step, and the least that its work could take on this card."""

    name: str
    us: float
    share: float
    floor_us: float | None
    calls: int


@dataclass(frozen=True)
class Profile:
    work: str
    total_us: float
    """The step as the engine runs it."""
    parts: tuple[Part, ...]


def run(
    model: GptOss, shape: Outline, setup: Setup, batch: int, depth: int, prompt: int, trace: Path | None = None
) -> list[Profile]:
    """One decoding step of ``batch`` sequences after ``depth`` tokens, and one prompt of ``prompt`` tokens."""
    floors = {part.layer: part.estimate.floor_us for part in decode_parts(shape, model.ops.plan, setup, batch, depth)}
    decode = Case("tg", 4 * STEPS, batch, depth)
    plain = _decode_us(model, decode, STEPS)
    long = {part.layer: part.estimate.floor_us for part in prompt_parts(shape, model.ops.plan, setup, prompt, 0, True)}
    whole = _prompt_us(model, prompt)
    name_parts(model)
    first, events = _traced(lambda: _decode_us(model, decode, STEPS, eager=True), trace)
    found = [_profile(f"decode, batch {batch}, depth {depth}", plain, events, STEPS, first, floors)]
    first, events = _traced(lambda: _prompt_us(model, prompt), None)
    return [*found, _profile(f"prompt of {prompt} tokens", whole, events, 1, first, long)]


def _engine(model: GptOss, case: Case, prompt: int, new: int, eager: bool) -> Engine:
    engine = make_engine(model, case, step_tokens=max(8192, prompt), enforce_eager=eager)
    chooser = random.Random(0)
    for index in range(case.batch):
        tokens = [chooser.randrange(model.config.vocab_size) for _ in range(prompt)]
        engine.submit(Request(str(index), tokens, SamplingParams(max_tokens=new, ignore_eos=True)))
    return engine


def _decode_us(model: GptOss, case: Case, steps: int, *, eager: bool = False) -> float:
    """Microseconds of one decoding step; kernels are compiled and graphs captured before."""
    engine = _engine(model, case, max(case.depth, 1), 3 * steps, eager)
    for _ in range(steps):
        engine.step()
    return _timed(model, lambda: [engine.step() for _ in range(steps)]) / steps


def _prompt_us(model: GptOss, prompt: int) -> float:
    case = Case("pp", prompt, 1, 0)
    _engine(model, case, prompt, 1, eager=True).step()  # compiles
    return _timed(model, _engine(model, case, prompt, 1, eager=True).step)


def _timed(model: GptOss, work: Callable[[], object]) -> float:
    def wait() -> None:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)

    wait()
    begin = time.perf_counter()
    with record_function(PREFIX + "timed"):
        work()
        wait()
    return (time.perf_counter() - begin) * 1e6


def _traced(work: Callable[[], float], trace: Path | None) -> tuple[float, list[Any]]:
    """What ``work`` gives, and the events of its timed part."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        result = work()
    if trace is not None:
        recorded.export_chrome_trace(str(trace))
    events = list(recorded.events() or ())
    (timed,) = (event for event in events if event.name == PREFIX + "timed")
    inside = [e for e in events if e.name.startswith(PREFIX) and e is not timed]
    return result, [e for e in inside if timed.time_range.start <= e.time_range.start <= timed.time_range.end]


def _profile(
    work: str, total: float, events: list[Any], steps: int, traced: float, floors: dict[str, float]
) -> Profile:
    on_gpu = any(event.device_time_total > 0 for event in events)
    times: dict[str, list[float]] = {}
    for event in events:
        took = event.device_time_total if on_gpu else event.cpu_time_total
        times.setdefault(event.name.removeprefix(PREFIX), []).append(took)
    sums = {name: sum(taken) / steps for name, taken in times.items()}
    # On a CPU the profiler slows the parts down with everything else; only what the step takes more is a gap.
    whole = total if on_gpu else traced
    gap = max(0.0, whole - sum(sums.values()))
    parts = [
        Part(name, us, us / whole, floors.get(name), len(times[name]) // steps)
        for name, us in sorted(sums.items(), key=lambda item: -item[1])
    ]
    return Profile(work, whole, (*parts, Part(GAP, gap, gap / whole, None, 0)))


def table(profiles: list[Profile]) -> str:
    lines = []
    for found in profiles:
        lines.append(f"{found.work}: {found.total_us:.0f} us")
        lines.append(f"  {'part':<20} {'calls':>5} {'us':>9} {'share':>6} {'floor':>8} {'of it':>6}")
        for part in found.parts:
            floor = "" if part.floor_us is None else f"{part.floor_us:.1f}"
            reached = "" if not part.floor_us or not part.us else f"{100 * part.floor_us / part.us:.0f}%"
            us = f"{part.us:>9.1f} {100 * part.share:>5.1f}%"
            lines.append(f"  {part.name:<20} {part.calls:>5} {us} {floor:>8} {reached:>6}")
    return "\n".join(lines)


def as_json(profiles: list[Profile]) -> list[dict[str, object]]:
    return [asdict(found) for found in profiles]
