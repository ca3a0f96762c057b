"""How good the case tables are: kernels with one small fault each (``ptxproof.mutate``), and which cases notice.

A mutant is tried on the cases of one card that start a kernel with its function, those of ``--quick`` first and small
kernels before large ones, until one fails. A kernel is compiled once for a mutant, and only if Triton's first
intermediate code is not what it was; a case whose PTX is unchanged is not executed. Every result is a line of a JSON
file at once, so a run goes on where it was interrupted, and a larger sample contains the smaller one of the same seed.
What a run with ``quick`` leaves alive, one without it tries on the other cases.
"""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from microscale.hardware import Gpu
from microscale.kernels.compiling.pool import Died, run_forked
from microscale.kernels.launch import Kernel
from microscale_lab.prove.bridge import interpreted, proof_kernel
from microscale_lab.prove.execute import Outcome, run_case
from microscale_lab.prove.host import called, forget
from microscale_lab.prove.selection import CPU, CaseOnCard, Progress, cases_of, select, shorten, unit_size
from ptxproof import TritonKernel, compile_to_ptx
from ptxproof.cache import IrCache, PtxCache
from ptxproof.compiler import cache_key, compile_to_ir, reason
from ptxproof.interpreter.launched import Compile
from ptxproof.mutate import DROPPED_OTHER, OPERATORS, HostFunction, Mutant, apply, callees, mutants, without_lines

T = TypeVar("T")
KILLED, SURVIVED, EQUIVALENT, INVALID = "killed", "survived", "equivalent", "invalid"
ZERO_ANYWAY = "without it Triton sets the register of a masked lane to 0"
UNREACHED = "unreached"
"""No kernel of any case contains the statement: a survivor whose reason is known."""
CASE_LIMIT_S = 100.0
"""CPU time of one case; the slowest takes a fifth of it. A mutant that needs more does not end."""
MUTANT_LIMIT_S = 300.0
"""CPU time after which no further case of a mutant begins."""
QUICK_LIMIT_S = 40.0
"""The same with ``quick``: what is alive by then is tried by a run without it."""


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
    whole: bool = True
    """Whether cases that are not ``--quick``'s would have been tried too."""

    @property
    def open(self) -> bool:
        """Other cases may notice yet."""
        return not self.whole and self.outcome in (SURVIVED, EQUIVALENT, UNREACHED)


@dataclass(frozen=True)
class _Target:
    """A function of a kernel or of the code that launches them, and the cases of a card that use it."""

    fn: Any
    gpu: Gpu
    units: tuple[tuple[CaseOnCard, bool], ...]
    """Each with whether ``--quick`` has it, those first."""


def measure(
    gpu: Gpu, ops: Sequence[str], results: Path, *, sample: int, seed: int, quick: bool, host: bool, jobs: int,
    cache_dir: Path | None, progress: Progress,
) -> list[MutantResult]:  # fmt: skip
    """Try a sample of the mutants of all kernels that ``gpu`` starts, except those in the file of results. Gives what
    the file then says about the sample. ``host``: of the Python code that packs weights and launches kernels."""
    targets = _targets(gpu, ops, PtxCache(cache_dir), host, progress)
    chosen = _sample([(mutant, target) for target in targets for mutant in mutants(target.fn)], sample, seed)
    known = {each.key: each for each in _read(results) if each.card == gpu.name}
    missing = [each for each in chosen if (past := known.get(each[0].key)) is None or (past.open and not quick)]
    sound: set[str] = set()
    work = [partial(_try, *each, Tools(PtxCache(cache_dir), IrCache(cache_dir), sound), quick) for each in missing]
    progress("mutants", len(chosen) - len(missing), len(chosen))
    for done, (index, answer) in enumerate(run_forked(work, num_workers=jobs), start=len(chosen) - len(missing) + 1):
        mutant = missing[index][0]
        told = {"outcome": INVALID, "why": f"its process {answer.how}"} if isinstance(answer, Died) else answer
        parts = mutant.function, mutant.line, mutant.operator, mutant.before, mutant.after
        result = MutantResult(mutant.key, gpu.name, *parts, **told, whole=not quick)
        if result.case is not None:
            sound.add(result.case)
        known[mutant.key] = result
        with results.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        progress("mutants", done, len(chosen))
    return [known[mutant.key] for mutant, _ in chosen]


def _read(results: Path) -> Iterator[MutantResult]:
    if results.exists():
        for line in results.read_text().splitlines():
            yield MutantResult(**json.loads(line))


def _targets(gpu: Gpu, ops: Sequence[str], kept: PtxCache, host: bool, progress: Progress) -> list[_Target]:
    """Our functions that a case starts or calls, by name; with ``ops`` those in their folders."""
    folders = tuple(f"microscale.kernels.{op}." for op in ops) or ("microscale.",)
    selected = select([gpu], cases_of(ops), CPU, progress)
    quick = {id(unit) for unit in shorten(selected).units}
    lengths = {kernel: _length(kernel, gpu, kept) for kernel in {k for unit in selected.units for k in unit.kernels}}

    def cost(unit: CaseOnCard) -> tuple[bool, int, Any]:
        return id(unit) not in quick, sum(lengths[kernel] for kernel in unit.kernels), unit_size(unit)

    by_size = sorted(selected.units, key=cost)
    using: dict[Any, list[tuple[CaseOnCard, bool]]] = defaultdict(list)
    for unit in by_size:
        for fn in called(unit) if host else set().union(*(_reached(kernel.fn) for kernel in unit.kernels)):
            if fn.__module__.startswith(folders):
                using[fn].append((unit, id(unit) in quick))
    found = [_Target(fn, gpu, tuple(units)) for fn, units in using.items()]
    return sorted(found, key=lambda target: (target.fn.__module__, target.fn.__name__))


LONG = 100_000


def _length(kernel: Kernel, gpu: Gpu, kept: PtxCache) -> int:
    """Of its PTX: it says how long compiling takes. Where it is not known, a long one."""
    made = kept.load(proof_kernel(kernel), gpu.sm)
    return LONG if made is None else len(made[0])


_reached = cache(callees)


def _sample(found: Sequence[tuple[Mutant, _Target]], size: int, seed: int) -> list[tuple[Mutant, _Target]]:
    """As many of each operator, as far as there are: one kind has more than all others together."""
    chooser = random.Random(seed)
    columns = [[each for each in found if each[0].operator == operator] for operator in OPERATORS]
    for column in columns:
        chooser.shuffle(column)
    return [each for each in chain.from_iterable(zip_longest(*columns)) if each is not None][:size]


@dataclass(frozen=True)
class Tools:
    """What attempts share."""

    ptx: PtxCache
    ir: IrCache
    sound: set[str]
    """Cases that pass without a fault. Attempts are forked one by one, so each has what those before it showed."""


@dataclass
class _Changed:
    """A card's kernels with the mutant, each compiled once."""

    mutant: Mutant
    target: _Target
    tools: Tools
    found: dict[str, tuple[str, int] | None] = field(default_factory=dict)
    """``None``: as without the mutant."""
    kernels: list[TritonKernel] = field(default_factory=list)

    def meets(self, kernel: TritonKernel) -> bool:
        """Whether the kernel is another one with the mutant. Raises what the compiler raises."""
        sm = self.target.gpu.sm
        key = cache_key(kernel, sm)
        if key not in self.found:
            self.kernels.append(kernel)
            before = self.tools.ir.compiled(kernel, sm)
            self.found[key] = None
            if self._with(self.mutant.source, partial(compile_to_ir, kernel, sm)) != before:
                made = self._with(self.mutant.source, partial(compile_to_ptx, kernel, sm))
                if without_lines(made[0]) != without_lines(self.tools.ptx.compiled(kernel, sm)[0]):
                    self.found[key] = made
        return self.found[key] is not None

    def compiled(self, kernel: TritonKernel, sm: int) -> tuple[str, int]:
        return self.found.get(cache_key(kernel, sm)) or self.tools.ptx.compiled(kernel, sm)

    def reached(self) -> bool:
        """Whether the compiler comes by the statement in any kernel."""
        for kernel in self.kernels:
            try:
                self._with(self.mutant.probe, partial(compile_to_ir, kernel, self.target.gpu.sm))
            except Exception:  # whatever the compiler raises for a name that is not defined
                return True
        return False

    def _with(self, source: str, compile_it: Callable[[], T]) -> T:
        original = self.target.fn.src
        apply(self.target.fn, source)
        try:
            return compile_it()
        finally:
            apply(self.target.fn, original)


def _try(mutant: Mutant, target: _Target, tools: Tools, quick: bool, log: IO[bytes]) -> dict[str, Any]:
    """In a process of its own: ``fn`` stays as it is only between compilations."""
    torch.set_num_threads(1)
    if isinstance(target.fn, HostFunction):
        return _try_host(mutant, target, tools, quick)
    changed = _Changed(mutant, target, tools)
    ran, unknown = 0, ""  # cases; why others do not count
    units = [each for each in target.units if each[1] or not quick]
    limit = QUICK_LIMIT_S if quick else MUTANT_LIMIT_S
    for unit, is_quick in units:
        if time.process_time() > limit:
            unknown = f"no further case was tried after {limit:g} s"
            break
        try:
            meets = [changed.meets(k) for k in map(proof_kernel, unit.kernels) if target.fn in _reached(k.fn)]
        except Exception as error:  # whatever the compiler raises: the mutant is no program
            return {"outcome": INVALID, "why": reason(error, ""), "of": len(target.units)}
        if not any(meets):
            continue
        outcome = _execute(unit, changed.compiled)
        unknown = outcome.left_out or unknown
        ran += outcome.left_out is None
        named = _name(unit)
        if outcome.fault and (named in tools.sound or _execute(unit, tools.ptx.compiled).fault is None):
            counts = {"case": named, "quick": is_quick, "ran": ran, "of": len(target.units)}
            return {"outcome": KILLED, "why": outcome.fault, **counts}
    counts = {"ran": ran, "of": len(target.units)}
    if mutant.operator == DROPPED_OTHER and re.search(r"other=0(\.0)?\b", mutant.before):
        return {"outcome": EQUIVALENT, "why": ZERO_ANYWAY, **counts}
    if ran or unknown:
        return {"outcome": SURVIVED if ran else INVALID, "why": unknown, **counts}
    what = f"of {len(changed.kernels)} kernels"
    if changed.reached():
        return {"outcome": EQUIVALENT, "why": f"the same code in all {what}", **counts}
    return {"outcome": UNREACHED, "why": f"none {what} contains it", **counts}


def _try_host(mutant: Mutant, target: _Target, tools: Tools, quick: bool) -> dict[str, Any]:
    """The same for code that packs and launches, which may then start other kernels or give them other numbers."""
    ran = 0
    for unit, is_quick in (each for each in target.units if each[1] or not quick):
        if time.process_time() > (QUICK_LIMIT_S if quick else MUTANT_LIMIT_S):
            break
        sound = _name(unit) in tools.sound or _passes(_execute(unit, tools.ptx.compiled))
        target.fn.apply(mutant.source)
        forget()
        outcome = _execute(unit, tools.ptx.compiled)
        target.fn.apply(target.fn.src)
        forget()
        ran += 1
        if sound and not _passes(outcome):
            counts = {"case": _name(unit), "quick": is_quick, "ran": ran, "of": len(target.units)}
            return {"outcome": KILLED, "why": outcome.fault or outcome.left_out, **counts}
    return {"outcome": SURVIVED, "why": "", "ran": ran, "of": len(target.units)}


def _passes(outcome: Outcome) -> bool:
    """Code that refuses what it took before is noticed as well."""
    return outcome.fault is None and outcome.left_out is None


def _name(unit: CaseOnCard) -> str:
    return f"{unit.case.op}, {unit.case.variant(unit.gpu)}: {unit.case.name}"


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
