"""Refuses a start that cannot fit, before anything is loaded, with the arithmetic and the cheapest ways to make it fit.

Options are tried from the one that costs the user least (a little more of the card) to the one that costs most
(quality). The refusal names the first three that fit, each with what it then needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from microscale.engine.loading.memory import LEAST_CONTEXT, Memory, Workload, memory_for
from microscale.engine.loading.usable import reserve_bytes, usable_memory
from microscale.errors import Unsupported
from microscale.hardware import GIB, KNOWN
from microscale.models.outline import Outline
from microscale.planning.decision import Plan
from microscale.planning.plan import Setup, make_plan
from microscale.planning.precision import PRECISIONS

MAX_ADVICE = 3
MAX_CARDS = 8
LEAST_RESERVE = 4 * GIB
"""The least that a refusal proposes to leave to a system that shares its memory."""


@dataclass(frozen=True)
class FittingOption:
    """Options that make a model fit, and the bytes that it then needs."""

    options: str
    needed: int


def plan_and_size(
    outline: Outline, setup: Setup, workload: Workload, available: int | None = None
) -> tuple[Plan, Memory]:
    """What runs, and what that takes. ``available`` is what the machine reports as free."""
    plan = make_plan(outline.name, outline.uses, setup)
    return plan, memory_for(outline, plan, setup, workload, available)


def check_fits(outline: Outline, setup: Setup, memory: Memory) -> None:
    """Raise why a model does not fit, if it does not."""
    if not memory.fits:
        raise Unsupported(refusal(memory, advice(outline, setup, memory)))


def refusal(memory: Memory, helps: str) -> str:
    """One sentence: what is needed, what there is, and what ``helps``."""
    weights = sum(memory.weights.values())
    largest = max(memory.weights, key=lambda kind: memory.weights[kind])
    kv = memory.needed - memory.fixed
    sequences = memory.workload.sequences
    cached = f"{memory.context} tokens"
    if sequences > 1:
        same = memory.promised == memory.context
        cached = f"{sequences} x {cached}" if same else f"{cached} and {sequences - 1} x {memory.promised}"
    parts = [
        f"weights {gib(weights)} ({largest} {gib(memory.weights[largest])})",
        f"KV cache {'and states ' if memory.kv.states else ''}{gib(kv)} for {cached}",
        f"activations {gib(memory.activations)}",
    ]
    if memory.graphs + memory.runtime:
        parts.append(f"graphs and runtime {gib(memory.graphs + memory.runtime)}")
    need = f"{memory.model} needs {gib(memory.needed)} GiB on {memory.gpu.name}: {' + '.join(parts)}"
    have = f"{gib(memory.usable)} GiB may be used ({memory.usable_because})"
    return f"{need}, and {have}; {helps}."


def advice(outline: Outline, setup: Setup, memory: Memory) -> str:
    """What makes a model fit that does not: options, or other cards."""
    options, least = fitting_options(outline, setup, memory)
    if options:
        return "it fits with " + ", or with ".join(f"{option.options} ({gib(option.needed)} GiB)" for option in options)
    share = memory.workload.utilization
    by_memory = sorted(KNOWN.items(), key=lambda item: item[1].memory_bytes)
    cards = [name for name, card in by_memory if usable_memory(card, share, None)[0] >= memory.needed]
    left_out = len(cards) - MAX_CARDS
    more = f" and {left_out} larger {'one' if left_out == 1 else 'ones'}" if left_out > 0 else ""
    nearest = "" if least is None else f" (the least, {least.options}, needs {gib(least.needed)})"
    held = f"cards that hold it: {', '.join(cards[:MAX_CARDS])}{more}" if cards else "no known card holds it"
    return f"no option makes it fit{nearest}; {held}"


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}" if num_bytes >= GIB // 10 else f"{num_bytes / GIB:.2f}"


def fitting_options(outline: Outline, setup: Setup, memory: Memory) -> tuple[list[FittingOption], FittingOption | None]:
    """The cheapest options that make the model fit, and of those that do not suffice the one that needs least."""
    fitting: list[FittingOption] = []
    least: FittingOption | None = None
    for options, other_setup, workload in _candidates(outline, setup, memory):
        try:
            _, other = plan_and_size(outline, other_setup, workload, memory.available)
        except Unsupported:
            continue
        candidate = FittingOption(options, other.needed)
        if other.fits:
            fitting.append(candidate)
        elif least is None or candidate.needed < least.needed:
            least = candidate
        if len(fitting) == MAX_ADVICE:
            break
    return fitting, least


def _candidates(outline: Outline, setup: Setup, memory: Memory) -> Iterator[tuple[str, Setup, Workload]]:
    workload = memory.workload
    if workload.utilization < 0.95 and not setup.gpu.is_cpu:
        yield "--gpu-memory-utilization 0.95", setup, replace(workload, utilization=0.95)
    if setup.gpu.unified and reserve_bytes(setup.gpu, workload.reserve) > LEAST_RESERVE:
        yield f"--reserve-memory {LEAST_RESERVE // GIB}", setup, replace(workload, reserve=LEAST_RESERVE)
    setups = [("", setup), *_precisions(setup)]
    for options, other in setups:
        if options:
            yield options, other, workload
        yield from _smaller(options, outline, other, memory)
    if setup.gpu.is_cpu and setup.preference.backend is None:
        reference = replace(setup, preference=replace(setup.preference, backend="reference", moe_backend=None))
        yield "--backend reference, which decodes the experts on every step", reference, workload


def _precisions(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Less exact ways to hold the model, the most exact first."""
    precision = setup.precision
    if precision.kv_format != "fp8":
        yield "--kv-cache-dtype fp8", replace(setup, precision=replace(precision, kv_cache_dtype="fp8"))
    names = list(PRECISIONS)
    for name in names[names.index(precision.name) + 1 :]:
        yield f"--precision {name}", replace(setup, precision=precision.named(name))
    if "experts" not in dict(precision.chosen):
        narrow = replace(precision, chosen=(*precision.chosen, ("experts", "mxfp4")))
        yield "--layer-format experts=mxfp4", replace(setup, precision=narrow)


def _smaller(options: str, outline: Outline, setup: Setup, wanted: Memory) -> Iterator[tuple[str, Setup, Workload]]:
    """The same precision with fewer sequences or a shorter context."""
    workload = wanted.workload
    try:
        _, memory = plan_and_size(outline, setup, workload, wanted.available)
    except Unsupported:
        return
    before = f"{options} " if options else ""
    if 1 <= memory.max_sequences < workload.sequences:
        fewer = memory.max_sequences
        yield f"{before}--max-num-seqs {fewer}", setup, replace(workload, sequences=fewer)
    if workload.context is not None and LEAST_CONTEXT <= memory.max_context < workload.context:
        shorter = memory.max_context // workload.page_size * workload.page_size
        yield f"{before}--max-model-len {shorter}", setup, replace(workload, context=shorter)
