"""Which cases are executed for which cards: the oracle is asked, and each case is rehearsed.

A rehearsal runs the op's own code once and lists its launches instead of starting them. Cards that would start the same
kernels in the same grids with the same numbers share one execution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microscale.hardware import Gpu
from microscale.kernels.launch import Kernel, Launch, taken_by
from microscale_lab.cases import KernelCase, all_cases
from ptxproof.targets import has_own_ptx, ptx_sm

Progress = Callable[[str, int, int], None]
"""Called with what is done, how often it is done, and how often in all."""


def quietly(what: str, done: int, total: int) -> None:
    """Shows nothing."""


CPU = "cpu"
CUDA = "cuda"
TOO_LARGE = "is too large for a CPU"
NOT_NEEDED = "a smaller case starts the same functions in the same forms (--quick)"


class Rehearsed(NamedTuple):
    """One launch, as far as it may differ from card to card."""

    kernel: Kernel
    grid: tuple[int, ...]
    numbers: tuple[Any, ...]
    """Its arguments but for tensors."""


@dataclass(frozen=True)
class CaseOnCard:
    """One execution: a case as a card runs it."""

    case: KernelCase
    gpu: Gpu
    launches: tuple[Rehearsed, ...]
    """As they were listed beforehand; none for a large case."""

    @property
    def kernels(self) -> set[Kernel]:
        return {start.kernel for start in self.launches}


class LeftOut(NamedTuple):
    """A case that is not executed for a card."""

    gpu: Gpu
    case: KernelCase
    reason: str
    variant: str | None
    """What would run it; ``None``: the card has no such case."""


@dataclass(frozen=True)
class Selection:
    """What is executed for which card, and what is not."""

    units: tuple[CaseOnCard, ...]
    standing: tuple[tuple[Gpu, int], ...]
    """For each case of each card the unit that is executed for it."""
    left_out: tuple[LeftOut, ...]


def cases_of(ops: Sequence[str]) -> list[KernelCase]:
    """The cases of these ops, or of all."""
    return [case for case in all_cases() if not ops or case.op in ops]


def rehearse(case: KernelCase, gpu: Gpu) -> CaseOnCard:
    """The launches of a case. What they would have written is not there, so nothing is compared."""
    launches: list[Rehearsed] = []

    def take(started: Launch) -> bool:
        numbers = tuple(value for value in started.arguments if not isinstance(value, Tensor))
        launches.append(Rehearsed(started.kernel(), tuple(started.grid), numbers))
        return False

    with taken_by(take), _one_thread():
        case.start(gpu, CPU)
    return CaseOnCard(case, gpu, tuple(launches))


@contextmanager
def _one_thread() -> Iterator[None]:
    """For tensors as small as a case's: threads that wait for each other take more time than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def select(gpus: Sequence[Gpu], cases: Iterable[KernelCase], device: str, progress: Progress = quietly) -> Selection:
    """Which cases each card has, and which executions they come down to."""
    units: dict[tuple[int, int, Any], int] = {}
    found: list[CaseOnCard] = []
    standing: list[tuple[Gpu, int]] = []
    left_out: list[LeftOut] = []
    listed = list(cases)
    # A card whose PTX also covers another card goes first.
    for gpu in sorted(gpus, key=lambda gpu: not has_own_ptx(gpu.sm)):
        for place, case in enumerate(listed):
            progress("selecting", place, len(listed))
            if reason := case.refuses(gpu):
                left_out.append(LeftOut(gpu, case, reason, None))
                continue
            if case.large and device == CPU:
                left_out.append(LeftOut(gpu, case, TOO_LARGE, case.variant(gpu)))
                continue
            # A large case takes seconds and gigabytes on a CPU to list what it starts: each card runs its own.
            unit = CaseOnCard(case, gpu, ()) if case.large else rehearse(case, gpu)
            if not unit.launches and not case.large:
                left_out.append(LeftOut(gpu, case, "starts no kernel", None))
                continue
            key = (place, ptx_sm(gpu.sm), unit.launches or gpu.name)
            at = units.setdefault(key, len(found))
            if at == len(found):
                found.append(unit)
            standing.append((gpu, at))
    return Selection(tuple(found), tuple(standing), tuple(left_out))


def shorten(selected: Selection) -> Selection:
    """As few executions as start every variant, and every jit function in every form: each with every format of
    weights and KV."""
    seen: set[Any] = set()
    kept: list[int] = []
    by_size = sorted(range(len(selected.units)), key=lambda at: unit_size(selected.units[at]))
    for at in by_size:
        unit = selected.units[at]
        forms = {(unit.gpu.sm, *_form(kernel)) for kernel in unit.kernels}
        forms.add((unit.gpu.sm, unit.case.op, unit.case.variant(unit.gpu)))
        if forms - seen:
            seen |= forms
            kept.append(at)
    place = {at: new for new, at in enumerate(kept)}
    standing = tuple((gpu, place[at]) for gpu, at in selected.standing if at in place)
    dropped = ((gpu, selected.units[at].case) for gpu, at in selected.standing if at not in place)
    left_out = [LeftOut(gpu, case, NOT_NEEDED, case.variant(gpu)) for gpu, case in dropped]
    return Selection(tuple(selected.units[at] for at in kept), standing, (*selected.left_out, *left_out))


LEAST_PROGRAMS = 8
FORM = ("BITS", "SCALES", "ROW_SCALES", "NVFP4", "MX", "FP8", "DIRECT", "EXPERT_WORDS", "CHANNELS", "GROUPS", "CAPPED")
"""Constants that make another kernel of a function: of the weights, the activations and the cache."""


def _form(kernel: Kernel) -> tuple[Any, ...]:
    constants = kernel.constants
    pointers = frozenset(kind for kind in kernel.signature.values() if kind.startswith("*"))
    return kernel.name, pointers, *((name, constants[name]) for name in FORM if name in constants)


def unit_size(unit: CaseOnCard) -> tuple[bool, int]:
    """Programs that it starts. So few that hardly anything can go wrong come last."""
    programs = sum(math.prod(start.grid) for start in unit.launches)
    return programs < LEAST_PROGRAMS, programs
