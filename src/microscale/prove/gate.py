"""Holds what was compiled against what the card can do and what was promised: the one place that says yes or no."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from microscale.hardware.targets import FORBIDDEN_PTX, TENSOR_MEMORY_COLUMNS, Target
from microscale.kernels.launch import Kernel
from microscale.prove.compiler import Facts


@dataclass(frozen=True)
class Row:
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


def judge(kernel: Kernel, label: str, target: Target, facts: Facts) -> Row:
    """The verdict on a kernel, with every reason against it."""
    faults = list(find_faults(kernel, target, facts))
    reason = " ".join(faults) or None
    if reason is None and facts.spill_bytes:
        reason = f"Spills {facts.spill_bytes} bytes, which is allowed: {kernel.spills_because}."
    return Row(
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


def find_faults(kernel: Kernel, target: Target, facts: Facts) -> Iterator[str]:
    """Each thing that is wrong, as a sentence with its numbers and what to do about it."""
    for name in facts.forbidden:
        yield f"Uses {name}, {FORBIDDEN_PTX[name]}."
    if facts.error is not None:
        # ptxas' own complaint adds nothing to the sentence about the instruction that it stumbled over.
        if not any(name in facts.error for name in facts.forbidden):
            yield f"Does not compile for {target.label}: {facts.error.rstrip('.')}."
        return
    if facts.shared is not None and facts.shared > target.shared_limit:
        yield (
            f"Needs {facts.shared} bytes of shared memory, and a block on {target.label} may use "
            f"{target.shared_limit}; take a smaller tile or fewer stages."
        )
    if facts.tensor_memory is not None and facts.tensor_memory > TENSOR_MEMORY_COLUMNS:
        yield (
            f"Needs {facts.tensor_memory} columns of tensor memory, and a block may use {TENSOR_MEMORY_COLUMNS}; "
            "take a smaller tile."
        )
    if kernel.promise is not None and not facts.promise_found:
        found = f"compiled to {', '.join(facts.mma)}" if facts.mma else "compiled to no matrix instruction"
        yield (
            f"Was promised {_readable(kernel.promise)} on {target.label} and {found}: the compiler fell back "
            "without a word."
        )
    if facts.spill_bytes and kernel.spills_because is None:
        yield (
            f"Spills {facts.spill_bytes} bytes of registers to memory; take a smaller tile or more warps, or say why "
            "it may in spills_because."
        )


_ANYTHING = re.compile(r"(?:\\[SwW]|\[[^]]*\]|\.)[*+]\??")


def _readable(pattern: str) -> str:
    """A regular expression as one would say it: ``mma\\.sync.*block_scale`` → ``mma.sync…block_scale``."""
    return _ANYTHING.sub("…", pattern.replace("\\.", "\0")).replace("\0", ".").replace("\\b", "")
