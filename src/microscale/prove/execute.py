"""Executes the case tables for cards that are not here: on a GPU that plays them, or on a CPU that interprets PTX.

refuses   which cases a card has, says the oracle
rehearse  the op's own code runs once and its launches are listed, not started: cards that would start the same
          kernels in the same grids share one execution
compile   on a CPU, all PTX first, in parallel processes, into a cache: compiling is the cost, not executing
run       each case in a process of its own; a crash is a fault of that case alone
"""

from __future__ import annotations

import importlib
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from microscale.errors import MicroscaleError, Unsupported
from microscale.hardware import Gpu
from microscale.hardware.targets import has_own_ptx, ptx_sm
from microscale.kernels.launch import Kernel, Launch, taken_by
from microscale.prove.cache import PtxCache
from microscale.prove.cases import Case, all_cases
from microscale.prove.compiler import warm_up
from microscale.prove.interpret.errors import NotInterpreted
from microscale.prove.interpret.launched import Edit, interpreted
from microscale.prove.pool import Died, run_forked, usable_cores

Progress = Callable[[str, int, int], None]
"""Called with what is done, how often it is done, and how often in all."""


def quietly(what: str, done: int, total: int) -> None:
    """Shows nothing."""


CPU = "cpu"
CUDA = "cuda"
TOO_LARGE = "is too large for a CPU"


@dataclass(frozen=True)
class Unit:
    """One execution: a case as a card runs it."""

    case: Case
    gpu: Gpu
    launches: tuple[tuple[Kernel, tuple[int, ...]], ...]

    @property
    def kernels(self) -> set[Kernel]:
        return {kernel for kernel, _ in self.launches}


@dataclass(frozen=True)
class Outcome:
    """What an execution showed."""

    worst: float = 0.0
    rms: float = 0.0
    fault: str | None = None
    left_out: str | None = None
    """Why it was not executed; nothing else means anything then."""
    spelled: dict[str, int] = field(default_factory=dict)
    """Instructions that were spelled out for the GPU at hand, by form."""


@dataclass(frozen=True)
class Executed:
    """A case on a card: the unit that stands for it, which another card may have run, and its outcome."""

    gpu: Gpu
    unit: Unit
    outcome: Outcome

    @property
    def variant(self) -> str:
        return self.unit.case.variant(self.gpu)


@dataclass(frozen=True)
class Plan:
    """What is executed for which card, and what is not."""

    units: tuple[Unit, ...]
    standing: tuple[tuple[Gpu, int], ...]
    """For each case of each card the unit that is executed for it."""
    left_out: Counter[tuple[str, str, str]]
    """Card, op and reason → how many cases the card does not have."""


def rehearse(case: Case, gpu: Gpu) -> Unit:
    """The launches of a case. What they would have written is not there, so nothing is compared."""
    launches: list[tuple[Kernel, tuple[int, ...]]] = []

    def take(started: Launch) -> bool:
        launches.append((started.kernel(), tuple(started.grid)))
        return False

    with taken_by(take), _one_thread():
        case.start(gpu, CPU)
    return Unit(case, gpu, tuple(launches))


@contextmanager
def _one_thread() -> Iterator[None]:
    """For tensors as small as a case's: threads that wait for each other take more time than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def plan(gpus: Sequence[Gpu], cases: Iterable[Case], device: str, progress: Progress = quietly) -> Plan:
    """Which cases each card has, and which executions they come down to."""
    units: dict[tuple[int, int, Any], int] = {}
    found: list[Unit] = []
    standing: list[tuple[Gpu, int]] = []
    left_out: Counter[tuple[str, str, str]] = Counter()
    listed = list(cases)
    # A card whose PTX stands for another's goes first.
    for gpu in sorted(gpus, key=lambda gpu: not has_own_ptx(gpu.sm)):
        for place, case in enumerate(listed):
            progress("planning", place, len(listed))
            reason = case.refuses(gpu) or (TOO_LARGE if case.large and device == CPU else None)
            if reason is not None:
                left_out[gpu.name, case.op, reason] += 1
                continue
            unit = rehearse(case, gpu)
            if not unit.launches:
                left_out[gpu.name, case.op, "starts no kernel"] += 1
                continue
            at = units.setdefault((place, ptx_sm(gpu.sm), unit.launches), len(found))
            if at == len(found):
                found.append(unit)
            standing.append((gpu, at))
    return Plan(tuple(found), tuple(standing), left_out)


def cut_short(planned: Plan) -> Plan:
    """As few executions as start every jit function in every form: each with every format of weights and KV."""
    seen: set[Any] = set()
    kept: list[int] = []
    by_size = sorted(range(len(planned.units)), key=lambda at: _size(planned.units[at]))
    for at in by_size:
        unit = planned.units[at]
        forms = {(unit.gpu.sm, *_form(kernel)) for kernel in unit.kernels}
        if forms - seen:
            seen |= forms
            kept.append(at)
    place = {at: new for new, at in enumerate(kept)}
    standing = tuple((gpu, place[at]) for gpu, at in planned.standing if at in place)
    return replace(planned, units=tuple(planned.units[at] for at in kept), standing=standing)


LEAST_PROGRAMS = 8
FORM = ("BITS", "SCALES", "MX", "FP8", "DIRECT", "CHANNELS", "GROUPS", "CAPPED")
"""Constants that make another kernel of a function: of the weights, the activations and the cache."""


def _form(kernel: Kernel) -> tuple[Any, ...]:
    constants = kernel.constants
    pointers = frozenset(kind for kind in kernel.signature.values() if kind.startswith("*"))
    return kernel.name, pointers, *((name, constants[name]) for name in FORM if name in constants)


def _size(unit: Unit) -> tuple[bool, int]:
    """Programs that it starts. So few that hardly anything can go wrong come last."""
    programs = sum(math.prod(grid) for _, grid in unit.launches)
    return programs < LEAST_PROGRAMS, programs


def cuda_device() -> str | None:
    """The name of the CUDA device, if there is one. Asked in a process of its own: CUDA survives no fork."""
    (_, answer) = next(iter(run_forked([_ask_for_cuda], num_workers=1)))
    return None if isinstance(answer, Died) else answer["name"]


def _ask_for_cuda(log: IO[bytes]) -> dict[str, Any]:
    return {"name": torch.cuda.get_device_name() if torch.cuda.is_available() else None}


def execute(
    planned: Plan,
    *,
    device: str,
    jobs: int | None = None,
    cache_dir: Path | None = None,
    edit: Edit | None = None,
    progress: Progress = quietly,
) -> list[Executed]:
    """Run all units, and give each card its cases. ``edit`` changes PTX before it runs: how faults are seeded."""
    workers = jobs or usable_cores()
    outcomes: dict[int, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="microscale-ptx-") as scratch:
        cache = PtxCache(cache_dir or Path(scratch))
        if device == CPU:
            _compile(planned.units, cache, workers, progress)
        chunks = list(_chunks(planned.units, device))
        work = [partial(_run_chunk, [planned.units[at] for at in chunk], device, cache, edit) for chunk in chunks]
        progress("executing", 0, len(planned.units))
        for index, answer in run_forked(work, num_workers=workers):
            for place, at in enumerate(chunks[index]):
                if isinstance(answer, Died):
                    outcomes[at] = Outcome(fault=f"its process {answer.how}")
                else:
                    outcomes[at] = Outcome(**answer["outcomes"][place])
            progress("executing", len(outcomes), len(planned.units))
    return [Executed(gpu, planned.units[at], outcomes[at]) for gpu, at in planned.standing]


def _chunks(units: Sequence[Unit], device: str) -> Iterator[list[int]]:
    """Units by process: one each on a CPU; on a GPU, where a process takes seconds to start, by card and variant."""
    together: dict[Any, list[int]] = {}
    for at, unit in enumerate(units):
        key = at if device == CPU else (unit.gpu.name, unit.case.op, unit.case.variant(unit.gpu))
        together.setdefault(key, []).append(at)
    return iter(together.values())


def _compile(units: Sequence[Unit], cache: PtxCache, workers: int, show: Progress) -> None:
    """All PTX that is not there yet. What does not compile is a fault of the cases that need it, and shows there."""
    wanted = dict.fromkeys((kernel, unit.gpu.sm) for unit in units for kernel, _ in unit.launches)
    missing = [(kernel, sm) for kernel, sm in wanted if cache.load(kernel, sm) is None]
    for sm in {sm for _, sm in missing}:
        warm_up(sm)
    show("compiling", len(wanted) - len(missing), len(wanted))
    work = [partial(_compile_one, cache, kernel, sm) for kernel, sm in missing]
    for done, _ in enumerate(run_forked(work, num_workers=workers), start=1):
        show("compiling", len(wanted) - len(missing) + done, len(wanted))


def _compile_one(cache: PtxCache, kernel: Kernel, sm: int, log: IO[bytes]) -> dict[str, Any]:
    cache.compiled(kernel, sm)
    return {}


def _run_chunk(
    units: Sequence[Unit], device: str, cache: PtxCache, edit: Edit | None, log: IO[bytes]
) -> dict[str, Any]:
    # The parent may have used torch's threads, and a fork has none of them: with one thread nobody waits for them.
    torch.set_num_threads(1)
    return {"outcomes": [vars(_run(unit, device, cache, edit)) for unit in units]}


def _run(unit: Unit, device: str, cache: PtxCache, edit: Edit | None) -> Outcome:
    try:
        if device == CPU:
            with interpreted(unit.gpu.sm, edit, cache.compiled):
                return _held(unit, device)
        # By name: it talks to CUDA's driver, and the rest of this module must load where there is none.
        as_card = importlib.import_module("microscale.prove.as_card").as_card
        with as_card(unit.gpu, edit) as played:
            outcome = _held(unit, device)
        return replace(outcome, spelled=dict(played.spelled))
    except (NotInterpreted, Unsupported) as error:
        return Outcome(left_out=str(error))
    except MicroscaleError as error:
        return Outcome(fault=str(error))
    except Exception as error:  # a kernel may break anything, and each way is the finding
        return Outcome(fault=f"{type(error).__name__}: {error}")


def _held(unit: Unit, device: str) -> Outcome:
    compared = list(unit.case.start(unit.gpu, device)())
    fault = next((part.fault for part in compared if part.fault is not None), None)
    worst = max((part.found.worst for part in compared), default=0.0)
    rms = max((part.found.rms for part in compared), default=0.0)
    return Outcome(worst, rms, fault)


def cases_of(ops: Sequence[str]) -> list[Case]:
    """The cases of these ops, or of all."""
    return [case for case in all_cases() if not ops or case.op in ops]
