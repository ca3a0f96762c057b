"""``microscale profile MODEL``: where one decoding step and one prompt go, part by part.

The bound layers of a loaded model are wrapped in named ranges, and steps run under torch's profiler twice: as single
launches, which say what part each kernel belongs to, and as the engine runs them, with graphs, which say how long it
takes there (``trace``). What lies between two kernels of a step is *between kernels*, what lies between two steps the
*host gap*. The total is timed without a profiler, which itself costs something for every kernel. On a CPU the time of a
part is that of its calls.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from microscale.bench.cases import BenchCase
from microscale.bench.model import begin_decoding, make_engine, submit_random
from microscale.engine.engine import Engine
from microscale.engine.step_times import StepTimes
from microscale.models.families import AnyModel
from microscale.models.outline import Outline
from microscale.planning.plan import Setup, estimated
from microscale_lab.model_bench import trace as gpu_trace
from microscale_lab.model_bench.trace import HOST_GAP, LAUNCH_GAP, STEP

PREFIX = "microscale: "
SMALL = {
    "rms_norm": "norms",
    "add_rms_norm": "norms",
    "norm_add_norm": "norms",
    "gated": "gate of the MLP",
    "rope_and_write_kv": "rope and KV write",
    "add_norm_route": "norm and router",
    "norm_add_norm_route": "norm and router",
    "route": "norm and router",
}
"""Methods of the small ops → the part that they belong to."""
STEPS = 8
"""Decoding steps that are averaged, and as many before them."""
STEP_TOKENS = 8192


class Ranged:
    """A bound op whose calls run inside a named range."""

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


def name_parts(model: AnyModel) -> None:
    """Wrap every bound op of the model. For good: a model that was profiled serves nothing else."""
    target: Any = model
    target.embed = Ranged(model.embed, "embed")
    for layer in target.layers:
        for name, use in layer.uses.items():
            forms = dict.fromkeys(("with_mlp", "parts", "from_heads", "from_sum"), use)
            setattr(layer, name, Ranged(getattr(layer, name), use, forms))
        layer.small = Ranged(layer.small, "small", SMALL)
    if hasattr(model, "small"):  # a last norm that no layer does
        target.small = Ranged(model.small, "small", SMALL)
    target.lm_head = Ranged(model.lm_head, "lm_head", {"logits": "lm_head"})
    target.sampling = Ranged(model.sampling, "sampling")


@dataclass(frozen=True)
class ProfiledPart:
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
    """The step as the engine runs it, without a profiler; on a CPU with it."""
    parts: tuple[ProfiledPart, ...]


def run(
    model: AnyModel, shape: Outline, setup: Setup, batch: int, depth: int, prompt: int, trace: Path | None = None
) -> list[Profile]:
    """One decoding step of ``batch`` sequences after ``depth`` tokens, and one prompt of ``prompt`` tokens."""
    times = StepTimes(shape, model.ops.plan, setup, estimated)
    floors = {part.layer: part.time.floor_us for part in times.decode(batch, depth)}
    decode = BenchCase("tg", 4 * STEPS, batch, depth)
    plain = _decode_us(model, decode, STEPS)
    long = {part.layer: part.time.floor_us for part in times.prompt_step(prompt, 0, last=True)}
    whole = _prompt_us(model, prompt)
    name_parts(model)
    on_gpu = model.device.type == "cuda"
    works = (
        (
            f"decode, batch {batch}, depth {depth}",
            plain,
            STEPS,
            floors,
            lambda eager: _decode_us(model, decode, STEPS, eager),
        ),
        (f"prompt of {prompt} tokens", whole, 1, long, lambda _eager: _prompt_us(model, prompt)),
    )
    found = []
    for index, (work, total, steps, least, step) in enumerate(works):
        keep = trace if index == 0 else None
        if on_gpu:
            found.append(_on_gpu(work, total, steps, least, step, keep))
        else:
            first, events = _traced(partial(step, True), keep)
            found.append(_on_cpu(work, events, steps, first, least))
    return found


def _decode_us(model: AnyModel, case: BenchCase, steps: int, eager: bool = False) -> float:
    """Microseconds of one decoding step; kernels are compiled and graphs captured before."""
    engine = make_engine(model, case, STEP_TOKENS, enforce_eager=eager)
    begin_decoding(engine, model.config.vocab_size, case, STEP_TOKENS)
    for _ in range(steps):
        engine.step()
    return _timed(model, engine.step, steps) / steps


def _prompt_us(model: AnyModel, prompt: int) -> float:
    def engine() -> Engine:
        made = make_engine(model, BenchCase("pp", prompt, 1, 0), max(STEP_TOKENS, prompt), enforce_eager=True)
        submit_random(made, model.config.vocab_size, prompt, [1])
        return made

    engine().step()  # compiles
    return _timed(model, engine().step)


def _timed(model: AnyModel, step: Callable[[], object], steps: int = 1) -> float:
    def wait() -> None:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)

    wait()
    begin = time.perf_counter()
    for _ in range(steps):
        with record_function(PREFIX + STEP):
            step()
    wait()
    return (time.perf_counter() - begin) * 1e6


def _on_gpu(
    work: str, total: float, steps: int, floors: dict[str, float], step: Callable[[bool], float], keep: Path | None
) -> Profile:
    """Parts from the trace of single launches, times from the trace of graphs."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {eager: Path(folder) / f"{eager}.json" for eager in (True, False)}
        for eager, path in paths.items():
            _traced(partial(step, eager), path)
        if keep is not None:
            keep.write_bytes(paths[False].read_bytes())
        single = gpu_trace.read(paths[True], PREFIX)
        kernels = gpu_trace.name_parts(gpu_trace.read(paths[False], PREFIX), single)
    spent = fit_gaps({name: us / steps for name, us in gpu_trace.times(kernels).items()}, total)
    counts: dict[str, int] = {}
    for kernel in kernels:
        counts[kernel.part] = counts.get(kernel.part, 0) + 1
    return _profile(work, total, spent, {name: -(-count // steps) for name, count in counts.items()}, floors)


def fit_gaps(spent: dict[str, float], total: float) -> dict[str, float]:
    """Gaps between single launches are the profiler's own where it makes the host slower than the GPU: no more of them
    is kept than the step without a profiler has room for."""
    room = total - sum(us for name, us in spent.items() if name != LAUNCH_GAP)
    return spent | {LAUNCH_GAP: max(0.0, min(spent.get(LAUNCH_GAP, 0.0), room))}


def _on_cpu(work: str, events: list[Any], steps: int, traced: float, floors: dict[str, float]) -> Profile:
    times: dict[str, list[float]] = {}
    for event in events:
        times.setdefault(event.name.removeprefix(PREFIX), []).append(event.cpu_time_total)
    sums = {name: sum(taken) / steps for name, taken in times.items()}
    # The profiler slows the parts down with everything else; only what the step takes more is a gap.
    sums[HOST_GAP] = max(0.0, traced - sum(sums.values()))
    counts = {name: len(taken) // steps for name, taken in times.items()}
    return _profile(work, traced, sums, counts, floors)


def _profile(
    work: str, total: float, spent: dict[str, float], counts: dict[str, int], floors: dict[str, float]
) -> Profile:
    """Largest first, the gaps last."""
    whole = sum(spent.values())
    order = sorted(spent, key=lambda name: (name in (LAUNCH_GAP, HOST_GAP), -spent[name]))
    parts = [
        ProfiledPart(name, spent[name], spent[name] / whole, floors.get(name), counts.get(name, 0)) for name in order
    ]
    return Profile(work, total, tuple(parts))


def _traced(work: Callable[[], float], path: Path | None) -> tuple[float, list[Any]]:
    """What ``work`` gives, and the events inside of its timed steps."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        result = work()
    if path is not None:
        recorded.export_chrome_trace(str(path))
    events = [event for event in recorded.events() or () if event.name.startswith(PREFIX)]
    steps = [event.time_range for event in events if event.name == PREFIX + STEP]
    inside = [event for event in events if any(s.start <= event.time_range.start <= s.end for s in steps)]
    return result, [event for event in inside if event.name != PREFIX + STEP]


def table(profiles: list[Profile]) -> str:
    lines = []
    for found in profiles:
        lines.append(f"{found.work}: {found.total_us:.0f} us")
        lines.append(f"  {'part':<20} {'count':>5} {'us':>9} {'share':>6} {'floor':>8} {'of it':>6}")
        for part in found.parts:
            floor = "" if part.floor_us is None else f"{part.floor_us:.1f}"
            reached = "" if not part.floor_us or not part.us else f"{100 * part.floor_us / part.us:.0f}%"
            us = f"{part.us:>9.1f} {100 * part.share:>5.1f}%"
            lines.append(f"  {part.name:<20} {part.calls:>5} {us} {floor:>8} {reached:>6}")
    return "\n".join(lines)


def as_json(profiles: list[Profile]) -> list[dict[str, object]]:
    return [asdict(found) for found in profiles]
