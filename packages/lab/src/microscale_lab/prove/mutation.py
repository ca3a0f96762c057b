"""How good the case tables are: kernels with one small fault each (``ptxproof.mutate``), and which cases notice.

A mutant is tried on the cases of one card that start a kernel with its function, those of ``--quick`` first, until one
fails. A case whose PTX is unchanged is not executed. Every result is a line of a JSON file at once, so a run goes on
where it was interrupted, and a larger sample contains the smaller one of the same seed.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import IO, Any

import torch

from microscale.hardware import Gpu
from microscale.kernels.compiling.pool import Died, run_forked
from microscale_lab.prove.bridge import interpreted, proof_kernel
from microscale_lab.prove.execute import Outcome, run_case
from microscale_lab.prove.selection import CPU, CaseOnCard, Progress, cases_of, select, shorten, unit_size
from ptxproof import TritonKernel, compile_to_ptx
from ptxproof.cache import PtxCache
from ptxproof.compiler import cache_key, reason
from ptxproof.interpreter.launched import Compile
from ptxproof.mutate import OPERATORS, Mutant, apply, callees, mutants, without_lines

KILLED, SURVIVED, EQUIVALENT, INVALID = "killed", "survived", "equivalent", "invalid"
UNREACHED = "unreached"
"""No kernel of any case contains the statement: a survivor whose reason is known."""
CASE_LIMIT_S = 100.0
"""CPU time of one case; the slowest takes a fifth of it. A mutant that needs more does not end."""
MUTANT_LIMIT_S = 400.0
"""CPU time after which no further case of a mutant begins."""


@dataclass(frozen=True)
class MutantResult:
    """A line of the file of results."""

    key: str
    card: str
    function: str
    line: int
    operator: str
    before: str
    after: str
    outcome: str
    why: str
    """The fault of the case that noticed, or why none could."""
    case: str | None = None
    quick: bool = False
    """Whether ``--quick`` has the case that noticed."""
    ran: int = 0
    """Cases that were executed."""
    of: int = 0
    """Cases that start a kernel with the function."""


@dataclass(frozen=True)
class _Target:
    """A function, and the cases of a card that use it."""

    fn: Any
    gpu: Gpu
    units: tuple[tuple[CaseOnCard, bool], ...]
    """Each with whether ``--quick`` has it, those first and small ones before large ones."""


def measure(
    gpu: Gpu, ops: Sequence[str], results: Path, *, sample: int, seed: int, jobs: int, cache_dir: Path | None,
    progress: Progress,
) -> list[MutantResult]:  # fmt: skip
    """Try a sample of the mutants of all kernels that ``gpu`` starts, except those in the file of results. Gives what
    the file then says about the sample."""
    targets = _targets(gpu, ops, progress)
    chosen = _sample([(mutant, target) for target in targets for mutant in mutants(target.fn)], sample, seed)
    known = {each.key: each for each in _read(results) if each.card == gpu.name}
    missing = [(mutant, target) for mutant, target in chosen if mutant.key not in known]
    work = [partial(_try, mutant, target, PtxCache(cache_dir)) for mutant, target in missing]
    progress("mutants", len(chosen) - len(missing), len(chosen))
    for done, (index, answer) in enumerate(run_forked(work, num_workers=jobs), start=len(chosen) - len(missing) + 1):
        mutant = missing[index][0]
        told = {"outcome": INVALID, "why": f"its process {answer.how}"} if isinstance(answer, Died) else answer
        parts = mutant.function, mutant.line, mutant.operator, mutant.before, mutant.after
        result = MutantResult(mutant.key, gpu.name, *parts, **told)
        known[mutant.key] = result
        with results.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        progress("mutants", done, len(chosen))
    return [known[mutant.key] for mutant, _ in chosen]


def _read(results: Path) -> Iterator[MutantResult]:
    if results.exists():
        for line in results.read_text().splitlines():
            yield MutantResult(**json.loads(line))


def _targets(gpu: Gpu, ops: Sequence[str], progress: Progress) -> list[_Target]:
    """Our functions that a case starts or calls, by name; with ``ops`` those in their folders."""
    folders = tuple(f"microscale.kernels.{op}." for op in ops) or ("microscale.",)
    selected = select([gpu], cases_of(ops), CPU, progress)
    quick = {id(unit) for unit in shorten(selected).units}
    by_size = sorted(selected.units, key=lambda unit: (id(unit) not in quick, unit_size(unit)))
    using: dict[Any, list[tuple[CaseOnCard, bool]]] = defaultdict(list)
    for unit in by_size:
        for fn in set().union(*(_reached(kernel.fn) for kernel in unit.kernels)):
            if fn.__module__.startswith(folders):
                using[fn].append((unit, id(unit) in quick))
    found = [_Target(fn, gpu, tuple(units)) for fn, units in using.items()]
    return sorted(found, key=lambda target: (target.fn.__module__, target.fn.__name__))


_reached = cache(callees)


def _sample(found: Sequence[tuple[Mutant, _Target]], size: int, seed: int) -> list[tuple[Mutant, _Target]]:
    """As many of each operator, as far as there are: one kind has more than all others together."""
    chooser = random.Random(seed)
    columns = [[each for each in found if each[0].operator == operator] for operator in OPERATORS]
    for column in columns:
        chooser.shuffle(column)
    return [each for each in chain.from_iterable(zip_longest(*columns)) if each is not None][:size]


def _try(mutant: Mutant, target: _Target, kept: PtxCache, log: IO[bytes]) -> dict[str, Any]:
    """In a process of its own: ``fn`` stays as it is only between compilations."""
    torch.set_num_threads(1)
    fn, sm, original = target.fn, target.gpu.sm, target.fn.src
    changed: dict[str, tuple[str, int] | None] = {}

    def compiled(kernel: TritonKernel, source: str) -> tuple[str, int]:
        apply(fn, source)
        try:
            return compile_to_ptx(kernel, sm)
        finally:
            apply(fn, original)

    def executed(kernel: TritonKernel, sm: int) -> tuple[str, int]:
        return changed.get(cache_key(kernel, sm)) or kept.compiled(kernel, sm)

    kernels: dict[str, TritonKernel] = {}
    ran, unknown = 0, ""  # cases; why others do not count
    for unit, quick in target.units:
        if time.process_time() > MUTANT_LIMIT_S:
            unknown = f"no further case was tried after {MUTANT_LIMIT_S:g} s"
            break
        uses = {cache_key(k, sm): k for k in map(proof_kernel, unit.kernels) if fn in _reached(k.fn)}
        kernels |= uses
        for key, kernel in uses.items():
            if key not in changed:
                try:
                    made = compiled(kernel, mutant.source)
                except Exception as error:  # whatever the compiler raises: the mutant is no program
                    return {"outcome": INVALID, "why": reason(error, ""), "of": len(target.units)}
                same = without_lines(made[0]) == without_lines(kept.compiled(kernel, sm)[0])
                changed[key] = None if same else made
        if all(changed[key] is None for key in uses):
            continue
        outcome = _execute(unit, executed)
        unknown = outcome.left_out or unknown
        ran += outcome.left_out is None
        if outcome.fault is not None and _execute(unit, kept.compiled).fault is None:
            named = f"{unit.case.op}, {unit.case.variant(unit.gpu)}: {unit.case.name}"
            counts = {"case": named, "quick": quick, "ran": ran, "of": len(target.units)}
            return {"outcome": KILLED, "why": outcome.fault, **counts}
    counts = {"ran": ran, "of": len(target.units)}
    if ran or unknown:
        return {"outcome": SURVIVED if ran else INVALID, "why": unknown, **counts}
    for kernel in kernels.values():
        try:
            compiled(kernel, mutant.probe)
        except Exception:
            return {"outcome": EQUIVALENT, "why": f"the same PTX in all {len(kernels)} kernels", **counts}
    return {"outcome": UNREACHED, "why": f"none of {len(kernels)} kernels contains it", **counts}


def _execute(unit: CaseOnCard, to_ptx: Compile) -> Outcome:
    try:
        with _cpu_limit(), interpreted(unit.gpu.sm, None, to_ptx):
            return run_case(unit, CPU)
    except _TooLong:
        return Outcome(fault=f"it did not end within {CASE_LIMIT_S:g} s of CPU time")


class _TooLong(BaseException):
    """Not an ``Exception``, which a case would take for the kernel's."""


@contextmanager
def _cpu_limit() -> Iterator[None]:
    def end(signum: int, frame: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, CASE_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def as_markdown(found: Sequence[MutantResult]) -> str:
    """Two tables, by operator and by module, and a line for each survivor."""
    tables = [
        _table("operator", found, lambda each: each.operator),
        _table("module", found, lambda each: each.function.removeprefix("microscale.kernels.").rpartition(".")[0]),
    ]
    alive = [
        f"- `{each.function.removeprefix('microscale.kernels.')}`, line {each.line}, {each.operator}: "
        f"`{each.before}` → `{each.after}`. {each.outcome.capitalize()}, {each.ran} cases executed."
        for each in found
        if each.outcome in (SURVIVED, UNREACHED)
    ]
    return "\n\n".join([*tables, "\n".join(alive)])


TABLE_HEADINGS = (
    "mutants", "invalid", "equivalent", "killed by `--quick`", "killed by other cases", "unreached", "survived",
    "killed of valid",
)  # fmt: skip
"""Valid: neither invalid (it does not compile) nor equivalent."""


def _table(heading: str, found: Sequence[MutantResult], group: Callable[[MutantResult], str]) -> str:
    headings = (heading, *TABLE_HEADINGS)
    lines = [f"| {' | '.join(headings)} |", f"|{' --- |' * len(headings)}"]
    groups: dict[str, list[MutantResult]] = defaultdict(list)
    for each in found:
        groups[group(each)].append(each)
    for name, each_of in (*sorted(groups.items()), ("all", list(found))):
        outcomes = Counter(each.outcome for each in each_of)
        quick = sum(each.quick for each in each_of)
        counted = len(each_of) - outcomes[INVALID] - outcomes[EQUIVALENT]
        share = f"{outcomes[KILLED] / counted:.0%}" if counted else "-"
        numbers = (
            len(each_of), outcomes[INVALID], outcomes[EQUIVALENT], quick, outcomes[KILLED] - quick,
            outcomes[UNREACHED], outcomes[SURVIVED],
        )  # fmt: skip
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} | {share} |")
    return "\n".join(lines)
