"""The limits of each SM that kernels are checked against, and how matrix instructions are read out of PTX.

Which ptxas reads the PTX (Triton's wheel carries one for Blackwell and one for the rest) is left to Triton, so that a
proof runs the same assembler, with the same flags, as the launch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ptxproof.errors import Unsupported

SHARED_PER_BLOCK: dict[int, int] = {
    80: 166912,
    86: 101376,
    89: 101376,
    90: 232448,
    100: 232448,
    103: 232448,
    120: 101376,
    121: 101376,
}
"""SM → bytes of shared memory that one block may opt in to."""
PROVED_SMS: tuple[int, ...] = tuple(SHARED_PER_BLOCK)
WARP_SIZE = 32
SAME_PTX = {120: 121}
"""An SM → the one whose PTX for a kernel is the same except for the header, and that is executed for both."""

# Columns of tensor memory that one block may allocate where tcgen05 exists; Triton refuses more only at launch.
TENSOR_MEMORY_COLUMNS = 512

FORBIDDEN_PTX: dict[str, str] = {
    "tile::scatter4": "a scatter through a tensor descriptor, which ptxas refuses for SM 9.0, 12.0 and 12.1; "
    "store through plain pointers",
    "tile::gather4": "a gather through a tensor descriptor, which ptxas refuses for SM 9.0; "
    "load through plain pointers",
}
"""Instructions that no kernel may use, even where they assemble: one source must serve every card."""


@dataclass(frozen=True)
class SmTarget:
    """One SM as the compiler sees it, with the limits that a kernel must respect there."""

    sm: int
    shared_limit: int
    """Bytes of shared memory that one block may opt in to."""

    @property
    def label(self) -> str:
        return f"SM {self.sm // 10}.{self.sm % 10}"


def ptx_sm(sm: int) -> int:
    """The SM under whose name this one's PTX is executed."""
    return SAME_PTX.get(sm, sm)


def has_own_ptx(sm: int) -> bool:
    """Whether its PTX is executed under its own name."""
    return sm not in SAME_PTX


def target(sm: int) -> SmTarget:
    """The limits of an SM that is proved."""
    try:
        return SmTarget(sm, SHARED_PER_BLOCK[sm])
    except KeyError:
        raise Unsupported(f"SM {sm} is not proved; known are {', '.join(map(str, PROVED_SMS))}.") from None


# ``mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32``, ``wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16``,
# ``tcgen05.mma.cta_group::1.kind::f16``, ``mma.sync…kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0``
_MATRIX = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)((?:\.[\w:]+)*)")
_SHORT = {"mma.sync": "mma.sync", "wgmma.mma_async": "wgmma", "tcgen05.mma": "tcgen05"}
_KIND = re.compile(r"\.kind::(\w+)")
_ELEMENT = re.compile(r"\.((?:bf|tf|f|s|u|b)\d+|e\dm\d)(?=\.|$)")


def matrix_instructions(ptx: str) -> tuple[str, ...]:
    """Short names of the matrix instructions in ``ptx``, without doubles: ``wgmma bf16``, ``tcgen05 f16`` …"""
    return tuple(sorted(set(_names(ptx))))


def _names(ptx: str) -> Iterator[str]:
    for instruction, modifiers in set(_MATRIX.findall(ptx)):
        kind = _KIND.search(modifiers)
        elements = _ELEMENT.findall(modifiers)
        scaled = "block_scale " if ".block_scale" in modifiers else ""
        # Without a kind the modifiers name the types of D, A, B (and C): A says which unit works.
        operand = kind[1] if kind else elements[1] if len(elements) > 1 else ""
        yield f"{_SHORT[instruction]} {scaled}{operand}".rstrip()
