"""Gathers every variant that the launchers may use, compiles what the cache does not know, and judges each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

from microscale.hardware import KNOWN, known
from microscale.hardware.targets import target
from microscale.kernels.op import Implementation, Variant
from microscale.prove.cache import FactsCache
from microscale.prove.compiler import Facts, cache_key, compile_variant, find_complaint, warm_up
from microscale.prove.gate import Row, judge
from microscale.prove.pool import Died, run_forked, usable_cores

Progress = Callable[[int, int], None]
"""Called with how many compilations are done, and how many there are."""


@dataclass(frozen=True)
class Task:
    """One row to be: a variant on an SM, and the key of the compilation that it needs."""

    label: str
    sm: int
    variant: Variant
    key: str


def prove(
    implementations: Iterable[Implementation[Any]],
    gpus: Sequence[str] | Literal["all"] = "all",
    *,
    ops: Sequence[str] = (),
    jobs: int | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """Compile every variant that ``implementations`` may launch on ``gpus``, and hold each against its card.

    ``ops`` names the ops to prove, all when empty. ``jobs`` is the number of processes, one per core by default.
    """
    tasks = gather(implementations, list(KNOWN) if gpus == "all" else gpus, ops)
    facts = _compile(tasks, jobs or usable_cores(), FactsCache(cache_dir), progress or (lambda done, total: None))
    return [judge(task.variant, task.label, target(task.sm), facts[task.key]) for task in tasks]


def gather(implementations: Iterable[Implementation[Any]], gpus: Sequence[str], ops: Sequence[str] = ()) -> list[Task]:
    """What the implementations may launch on any of these cards, by op and SM; what two cards share is there once."""
    offered = list(implementations)
    found: dict[tuple[str, int, str, str], tuple[Task, list[str]]] = {}
    for name in gpus:
        gpu = known(name)
        for implementation in offered:
            for variant in implementation.variants(gpu):
                # An implementation may launch another op's kernels as well (moe launches routing): either name picks.
                if ops and implementation.op not in ops and variant.op not in ops:
                    continue
                task = Task(f"{variant.implementation}/{variant.name}", gpu.sm, variant, cache_key(variant, gpu.sm))
                found.setdefault((variant.op, gpu.sm, task.label, task.key), (task, []))[1].append(name)
    return sorted(_told_apart(found), key=lambda task: (task.variant.op, task.sm))


def _told_apart(found: dict[tuple[str, int, str, str], tuple[Task, list[str]]]) -> Iterator[Task]:
    """Two cards of one SM may launch different kernels under one name: then the name says for which card."""
    namesakes = Counter(identity[:3] for identity in found)
    for identity, (task, cards) in found.items():
        alone = namesakes[identity[:3]] == 1
        yield task if alone else replace(task, label=f"{task.label}@{'+'.join(cards)}")


def _compile(tasks: Sequence[Task], num_workers: int, cache: FactsCache, progress: Progress) -> dict[str, Facts]:
    """Facts by key, from the cache or from a compiler."""
    facts: dict[str, Facts] = {}
    missing: dict[str, Task] = {}
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
    work = [partial(_facts_as_json, task.variant, task.sm) for task in todo]
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


def _facts_as_json(variant: Variant, sm: int, log: IO[bytes]) -> dict[str, Any]:
    return compile_variant(variant, sm, log).to_json()
