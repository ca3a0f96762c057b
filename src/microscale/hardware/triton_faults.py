"""Versions of Triton that compile some form of code to wrong numbers, with the public report of each.

A path of an implementation names the forms that it asks of Triton's compiler (``Path.uses``). The oracle refuses a path
where the Triton at hand is known to be wrong for one of them on the card's SM, and ``doctor`` tells the user. Versions
and SMs are written out: what a row does not name was not reported, and nothing here is compared by size. Code in Gluon
names its own instructions and layouts, so it takes none of these forms.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

DISTRIBUTIONS = ("triton", "pytorch-triton", "triton-windows")
"""Names under which Triton is installed."""


class TritonForm(StrEnum):
    """What a kernel may leave to Triton's compiler, as far as a fault was ever reported for it or we rely on it."""

    DOT = "tl.dot"
    SCALED_E4M3 = "tl.dot_scaled of E4M3 and E4M3, on block-scaled matrix instructions"
    SCALED_E2M1 = "tl.dot_scaled of E2M1 packed along K"
    SCALED_E2M1_MN = "tl.dot_scaled of E2M1 packed along M or N"
    SCALED_IN_BF16 = "tl.dot_scaled that is computed in bf16"
    CHAINED_DOTS = "two tl.dot in one loop that add to one accumulator"
    RECURRENT_DOT = "tl.dot whose operand is the sum that its loop carries"
    PACKED_ASM = "inline assembly of several elements at once"
    PACKED_ASM_BROADCAST = "inline assembly of several elements at once, of a broadcast operand"


USED_BY: dict[str, frozenset[TritonForm]] = {
    "grouped experts": frozenset({TritonForm.DOT}),
    "grouped experts, block-scaled": frozenset({TritonForm.SCALED_E4M3}),
    "grouped experts, NVFP4": frozenset({TritonForm.SCALED_E2M1}),
    "dense GEMM": frozenset({TritonForm.DOT}),
    "dense GEMM, block-scaled": frozenset({TritonForm.SCALED_E4M3}),
    "dense GEMM, NVFP4": frozenset({TritonForm.SCALED_E2M1}),
    "gated delta rule": frozenset({TritonForm.DOT}),
    # The assembly decodes FP8 keys and values.
    "paged attention": frozenset({TritonForm.DOT, TritonForm.PACKED_ASM}),
}
"""Our kernels in plain Triton that multiply, and their forms. Paths take theirs from here; ``doctor``, which imports no
kernel, reads it too."""


@dataclass(frozen=True)
class TritonFault:
    """One form that some versions compile to wrong numbers, without an error."""

    form: TritonForm
    versions: frozenset[str]
    """Releases, as ``3.8.0``; builds of the same release (``3.8.0+git…``) are taken to be as wrong."""
    sms: frozenset[int] | None
    """``None``: every SM."""
    what: str
    """What goes wrong, in one clause."""
    issue: str

    def concerns(self, version: str | None, sm: int) -> bool:
        return _release(version) in self.versions and (self.sms is None or sm in self.sms)


_TO_3_8 = frozenset({"3.6.0", "3.7.0", "3.7.1", "3.8.0"})
_ISSUES = "https://github.com/triton-lang/triton/issues"
_PULLS = "https://github.com/triton-lang/triton/pull"
FAULTS: tuple[TritonFault, ...] = (
    # Reported on SM 12.0. From 3.8 on SM 12.1 is lowered by the same code.
    TritonFault(
        TritonForm.SCALED_E2M1_MN, frozenset({"3.8.0"}), frozenset({120, 121}), "nearly every element is wrong",
        f"{_ISSUES}/11733",
    ),
    # A scale byte of 0 is 2**-127. Which releases have it: those that we use are listed, whether reported or not.
    TritonFault(
        TritonForm.SCALED_IN_BF16, _TO_3_8, None, "a scale byte of 0 counts as 0 and not as 2**-127",
        f"{_ISSUES}/11735",
    ),
    # Reported with 3.6.0, 3.7.1 and what became 3.8.0, where the left operand has 64 rows or more.
    TritonFault(
        TritonForm.CHAINED_DOTS, _TO_3_8, frozenset({100, 103}), "the pipelined products overwrite each other",
        f"{_ISSUES}/10821",
    ),
    # Also reported as runs that differ with the same input: issues 9871 and 10590.
    TritonFault(
        TritonForm.RECURRENT_DOT, _TO_3_8, frozenset({100, 103}), "the next product reads a sum that is out of step",
        f"{_PULLS}/10993",
    ),
    # Seen on an H200 too.
    TritonFault(
        TritonForm.PACKED_ASM_BROADCAST, _TO_3_8, None, "the assembly runs before the broadcast, on other neighbours",
        f"{_PULLS}/11238",
    ),
)  # fmt: skip


@cache
def installed_triton() -> str | None:
    """The version of Triton that compiles here; ``None`` where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def faults_of(version: str | None, sm: int) -> tuple[TritonFault, ...]:
    """Everything that this Triton is known to compile wrong for this SM."""
    return tuple(fault for fault in FAULTS if fault.concerns(version, sm))


def users(form: TritonForm) -> list[str]:
    """Our kernels that have this form."""
    return [name for name, uses in USED_BY.items() if form in uses]


def refusal(uses: Collection[TritonForm], version: str | None, sm: int) -> str | None:
    """Why code of these forms may not run, or ``None``: one clause with the report's address."""
    found = next((fault for fault in FAULTS if fault.form in uses and fault.concerns(version, sm)), None)
    if found is None:
        return None
    return f"uses {found.form}, which Triton {version} gets wrong on this card ({found.what}: {found.issue})"


def _release(version: str | None) -> str:
    """``3.8.0`` of ``3.8.0+git675c5987``."""
    return (version or "").partition("+")[0]
