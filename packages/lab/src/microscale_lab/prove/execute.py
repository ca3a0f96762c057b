"""Executes the case tables for cards that are not here: on a GPU that plays them, or on a CPU that interprets PTX.

What is executed comes from ``selection``. On a CPU all PTX is compiled first, in parallel processes, into a cache:
compiling is the cost, not executing. Then cases run in processes of their own, and a crash is a fault of the cases in
that process alone.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from microscale.errors import MicroscaleError, Unsupported
from microscale.hardware import Gpu
from microscale.kernels.compiling.pool import Died, run_forked, usable_cores
from microscale.kernels.launch import Kernel
from microscale_lab.prove.bridge import as_card, interpreted, proof_kernel
from microscale_lab.prove.selection import CPU, CaseOnCard, Progress, Selection, quietly
from ptxproof import Edit, NotInterpreted, ProofError
from ptxproof.cache import PtxCache
from ptxproof.compiler import warm_up


@dataclass(frozen=True)
class Outcome:
    """What an execution showed."""

    worst: float = 0.0
    rms: float = 0.0
    fault: str | None = None
    left_out: str | None = None
    """Why it was not executed; nothing else means anything then."""
    spelled: dict[str, int] = field(default_factory=dict)
    """Instructions that were spelled out for the GPU at hand, by form, in kernels that no case before it started."""
    kernels: int = 0
    """How many such kernels there were."""


@dataclass(frozen=True)
class ExecutedCase:
    """A case on a card, the execution that covers it (perhaps for another card), and its outcome."""

    gpu: Gpu
    unit: CaseOnCard
    outcome: Outcome

    @property
    def variant(self) -> str:
        return self.unit.case.variant(self.gpu)


def cuda_device() -> str | None:
    """The name of the CUDA device, if there is one. Asked in a process of its own: CUDA survives no fork."""
    (_, answer) = next(iter(run_forked([_ask_for_cuda], num_workers=1)))
    return None if isinstance(answer, Died) else answer["name"]


def _ask_for_cuda(log: IO[bytes]) -> dict[str, Any]:
    return {"name": torch.cuda.get_device_name() if torch.cuda.is_available() else None}


def execute(
    selected: Selection,
    *,
    device: str,
    jobs: int | None = None,
    cache_dir: Path | None = None,
    edit: Edit | None = None,
    progress: Progress = quietly,
) -> list[ExecutedCase]:
    """Run all units, and give each card its cases. ``edit`` changes PTX before it runs: how faults are seeded."""
    workers = jobs or usable_cores()
    outcomes: dict[int, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="microscale-ptx-") as scratch:
        cache = PtxCache(cache_dir or Path(scratch))
        if device == CPU:
            _compile(selected.units, cache, workers, progress)
        chunks = list(_chunks(selected.units, device))
        work = [partial(_run_chunk, [selected.units[at] for at in chunk], device, cache, edit) for chunk in chunks]
        progress("executing", 0, len(selected.units))
        for index, answer in run_forked(work, num_workers=workers):
            for place, at in enumerate(chunks[index]):
                if isinstance(answer, Died):
                    outcomes[at] = Outcome(fault=f"its process {answer.how}")
                else:
                    outcomes[at] = Outcome(**answer["outcomes"][place])
            progress("executing", len(outcomes), len(selected.units))
    return [ExecutedCase(gpu, selected.units[at], outcomes[at]) for gpu, at in selected.standing]


def _chunks(units: Sequence[CaseOnCard], device: str) -> Iterator[list[int]]:
    """Units by process: one each on a CPU; on a GPU, where a process takes seconds to start, by card and variant."""
    together: dict[Any, list[int]] = {}
    for at, unit in enumerate(units):
        key = at if device == CPU else (unit.gpu.name, unit.case.op, unit.case.variant(unit.gpu))
        together.setdefault(key, []).append(at)
    return iter(together.values())


def _compile(units: Sequence[CaseOnCard], cache: PtxCache, workers: int, show: Progress) -> None:
    """All PTX that is not there yet. What does not compile is a fault of the cases that need it, and shows there."""
    wanted = dict.fromkeys((kernel, unit.gpu.sm) for unit in units for kernel in unit.kernels)
    missing = [(kernel, sm) for kernel, sm in wanted if cache.load(proof_kernel(kernel), sm) is None]
    for sm in {sm for _, sm in missing}:
        warm_up(sm)
    show("compiling", len(wanted) - len(missing), len(wanted))
    work = [partial(_compile_one, cache, kernel, sm) for kernel, sm in missing]
    for done, _ in enumerate(run_forked(work, num_workers=workers), start=1):
        show("compiling", len(wanted) - len(missing) + done, len(wanted))


def _compile_one(cache: PtxCache, kernel: Kernel, sm: int, log: IO[bytes]) -> dict[str, Any]:
    cache.compiled(proof_kernel(kernel), sm)
    return {}


def _run_chunk(
    units: Sequence[CaseOnCard], device: str, cache: PtxCache, edit: Edit | None, log: IO[bytes]
) -> dict[str, Any]:
    # The parent may have used torch's threads, and a fork has none of them: with one thread nothing waits for them.
    torch.set_num_threads(1)
    outcomes = []
    with _as(units[0].gpu, device, cache, edit) as played:
        for unit in units:
            before, kernels = Counter(played.spelled), played.kernels
            outcome = run_case(unit, device)
            new = dict(Counter(played.spelled) - before)
            outcomes.append(vars(replace(outcome, spelled=new, kernels=played.kernels - kernels)))
    return {"outcomes": outcomes}


class Played(Protocol):
    """What has run so far: kernels, and the instructions that were spelled out in them."""

    @property
    def kernels(self) -> int: ...

    @property
    def spelled(self) -> Counter[str]: ...


@dataclass(frozen=True)
class _Interpreted:
    """Each instruction is executed as it is."""

    ran: Mapping[Kernel, int]
    spelled: Counter[str] = field(default_factory=Counter)

    @property
    def kernels(self) -> int:
        return len(self.ran)


@contextmanager
def _as(gpu: Gpu, device: str, cache: PtxCache, edit: Edit | None) -> Iterator[Played]:
    """Inside, kernels run as on ``gpu``."""
    if device == CPU:
        with interpreted(gpu.sm, edit, cache.compiled) as ran:
            yield _Interpreted(ran)
    else:
        with as_card(gpu, edit) as played:
            yield played


def run_case(unit: CaseOnCard, device: str) -> Outcome:
    """Execute one case by whatever takes launches, and compare."""
    try:
        compared = list(unit.case.start(unit.gpu, device)())
    except (NotInterpreted, Unsupported) as error:
        return Outcome(left_out=str(error))
    except (MicroscaleError, ProofError) as error:
        return Outcome(fault=str(error))
    except Exception as error:  # a kernel may break anything, and each way is the finding
        return Outcome(fault=f"{type(error).__name__}: {error}")
    if not compared:
        return Outcome(fault="the case compares nothing")
    fault = next((part.fault for part in compared if part.fault is not None), None)
    worst = max(part.found.worst for part in compared)
    rms = max(part.found.rms for part in compared)
    return Outcome(worst, rms, fault)
