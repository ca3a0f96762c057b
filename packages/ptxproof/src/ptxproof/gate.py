"""Checks a compiled kernel against the limits of an SM and against what the kernel promises."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from ptxproof.compiler import Facts, compile_kernel
from ptxproof.launch import TritonKernel, TritonLaunch
from ptxproof.targets import FORBIDDEN_PTX, TENSOR_MEMORY_COLUMNS, SmTarget, target


@dataclass(frozen=True)
class Proof:
    """One kernel on one SM."""

    sm: int
    facts: Facts
    faults: tuple[str, ...]
    """Everything that is wrong, a sentence each."""

    @property
    def ok(self) -> bool:
        return not self.faults


def prove(launch: TritonLaunch, sm: int) -> Proof:
    """Compile a launch's kernel for ``sm``, without a GPU, and check the result."""
    kernel = launch.kernel()
    with tempfile.TemporaryFile() as log:
        facts = compile_kernel(kernel, sm, log)
    return Proof(sm, facts, tuple(find_faults(kernel, target(sm), facts)))


def find_faults(kernel: TritonKernel, target: SmTarget, facts: Facts) -> Iterator[str]:
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
