"""Gathers every kernel that may be started on the cards, compiles what the cache does not hold, and checks each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

from microscale.hardware import REPRESENTATIVES, Gpu, known
from microscale.kernels.compiling.pool import Died, run_forked, usable_cores
from microscale.kernels.launch import Kernel
from microscale_lab.prove.bridge import proof_kernel
from ptxproof.cache import FactsCache
from ptxproof.compiler import Facts, cache_key, compile_kernel, find_complaint, warm_up
from ptxproof.gate import find_faults
from ptxproof.targets import SmTarget, target

Progress = Callable[[int, int], None]
"""Called with how many compilations are done, and how many there are."""
Source = Callable[[Gpu], Iterable[Kernel]]
"""What may be started on a card: ``inventory.recorded`` for all of ours."""
SHARED = "shared"


@dataclass(frozen=True)
class ProofRow:
    """One kernel on one SM. The fields are the keys of ``prove --json``; a figure is ``None`` if nothing compiled."""

    op: str
    variant: str
    sm: int
    ok: bool
    reason: str | None
    """Why the gate refused, or why it let a spill pass."""
    mma: tuple[str, ...]
    shared: int | None
    shared_limit: int
    registers: int | None
    spill_bytes: int | None


def check(kernel: Kernel, label: str, target: SmTarget, facts: Facts) -> ProofRow:
    """The result for a kernel, with every reason against it."""
    faults = list(find_faults(proof_kernel(kernel), target, facts))
    reason = " ".join(faults) or None
    if reason is None and facts.spill_bytes:
        reason = f"Spills {facts.spill_bytes} bytes, which is allowed: {kernel.spills_because}."
    return ProofRow(
        op=kernel.op,
        variant=label,
        sm=target.sm,
        ok=not faults,
        reason=reason,
        mma=facts.mma,
        shared=facts.shared,
        shared_limit=target.shared_limit,
        registers=facts.registers,
        spill_bytes=facts.spill_bytes,
    )


@dataclass(frozen=True)
class ProofTask:
    """One row to be: a kernel on an SM, and the key of the compilation that it needs."""

    label: str
    sm: int
    kernel: Kernel
    key: str


def prove(
    source: Source,
    gpus: Sequence[str] | Literal["all"] = "all",
    *,
    ops: Sequence[str] = (),
    jobs: int | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> list[ProofRow]:
    """Compile every kernel of ``source`` on ``gpus``, and hold each against its card. ``all``: those that between them
    start the kernels of all known cards.

    ``ops`` names the ops to prove, all when empty. ``jobs`` is the number of processes, one per core by default.
    """
    tasks = gather(source, REPRESENTATIVES if gpus == "all" else gpus, ops)
    facts = _compile(tasks, jobs or usable_cores(), FactsCache(cache_dir), progress or (lambda done, total: None))
    return [check(task.kernel, task.label, target(task.sm), facts[task.key]) for task in tasks]


def gather(source: Source, gpus: Sequence[str], ops: Sequence[str] = ()) -> list[ProofTask]:
    """What may be started on any of these cards, by op and SM; what two cards share is there once."""
    found: dict[tuple[int, Kernel], None] = {}
    for gpu in map(known, gpus):
        for kernel in source(gpu):
            if not ops or kernel.op in (*ops, SHARED):
                found.setdefault((gpu.sm, kernel))
    labels = _labels(found)
    tasks = [ProofTask(labels[sm, kernel], sm, kernel, cache_key(proof_kernel(kernel), sm)) for sm, kernel in found]
    return sorted(tasks, key=lambda task: (task.kernel.op, task.sm))


def _labels(found: Iterable[tuple[int, Kernel]]) -> dict[tuple[int, Kernel], str]:
    """Module, function and constants; where two kernels differ in something else, with that."""
    alike: dict[tuple[int, str], list[Kernel]] = defaultdict(list)
    for sm, kernel in found:
        alike[sm, kernel.label].append(kernel)
    labels = {}
    for (sm, label), kernels in alike.items():
        for kernel in kernels:
            extra = [text for text in _details(kernel) if any(text not in _details(other) for other in kernels)]
            labels[sm, kernel] = f"{kernel.module}/{' '.join((label, *extra))}"
    return labels


def _details(kernel: Kernel) -> list[str]:
    """All that a kernel's label leaves out: types, what divides by 16, and options."""
    pairs = zip(kernel.fn.arg_names, kernel.specialisation, strict=True)
    arguments = [f"{name}:{kind}{'' if value is None else value}" for name, (kind, value) in pairs]
    return arguments + [f"{name}={value}" for name, value in kernel.options]


def _compile(tasks: Sequence[ProofTask], num_workers: int, cache: FactsCache, progress: Progress) -> dict[str, Facts]:
    """Facts by key, from the cache or from a compiler."""
    facts: dict[str, Facts] = {}
    missing: dict[str, ProofTask] = {}
    for task in tasks:
        if task.key in facts or task.key in missing:
            continue
        cached = cache.load(task.key)
        if cached is None:
            missing[task.key] = task
        else:
            facts[task.key] = cached
    total = len(facts) + len(missing)
    progress(len(facts), total)
    for sm in {task.sm for task in missing.values()}:
        warm_up(sm)
    todo = list(missing.values())
    work = [partial(_facts_as_json, task.kernel, task.sm) for task in todo]
    for index, answer in run_forked(work, num_workers=num_workers):
        key = todo[index].key
        if isinstance(answer, Died):
            complaint = find_complaint(answer.log)
            facts[key] = Facts(error=f"the compiler {answer.how}" + (f" ({complaint})" if complaint else ""))
        else:
            facts[key] = Facts.from_json(answer)
            cache.store(key, facts[key])
        progress(len(facts), total)
    return facts


def _facts_as_json(kernel: Kernel, sm: int, log: IO[bytes]) -> dict[str, Any]:
    return compile_kernel(proof_kernel(kernel), sm, log).to_json()
