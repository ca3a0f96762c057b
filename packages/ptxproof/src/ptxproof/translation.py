"""PTX of one SM as PTX of another: what the other lacks is spelled out, all else stays as it is.

So a kernel that was compiled for a card that is not here runs on the one that is: Triton's choice of layouts, lanes and
scales for that card is executed, and only single instructions are replaced. What cannot be spelled out (tensor memory,
``wgmma``) is refused by name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ptxproof import spelled, spelled_mma
from ptxproof.errors import BadPtx, Unsupported
from ptxproof.instructions import lacked, oldest_ptx, target_name
from ptxproof.ptx import PtxInstruction, instructions, parse
from ptxproof.targets import target

SPELLINGS: dict[str, spelled.Spelling] = {
    "NVFP4 mma": spelled_mma.nvfp4_mma,
    "block-scaled mma": spelled_mma.block_scaled_mma,
    "FP8 mma": spelled_mma.fp8_mma,
    "FP8 to f16": spelled.fp8_to_f16,
    "float32 to FP8": spelled.float32_to_e4m3,
    "pairs of float32": spelled.packed_float32,
    "float32 and a narrower number in one sum": spelled.mixed_sum,
    "max or min of three": spelled.of_three,
    "sums and products of bf16": spelled.bf16_arithmetic,
    "comparison of bf16": spelled.bf16_comparison,
    "sums of two 16-bit integers": spelled.packed_integers,
    "stmatrix": spelled.stmatrix,
    "programmatic dependent launch": spelled.nothing,
}
"""How each form of ``instructions`` is spelled out."""

_TARGET = re.compile(r"^\.target[ \t]+\w+", re.MULTILINE)
_CLUSTERS = re.compile(r"\.(explicitcluster|reqnctapercluster|maxclusterrank)\b|%(n?cluster|is_explicit_cluster)\w*")
_VERSION = re.compile(r"^\.version[ \t]+(\d+)\.(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Translated:
    """A kernel for another SM."""

    ptx: str
    spelled: Counter[str]
    """How many instructions of each form were spelled out. Those that only a spelling uses are not counted."""


def translate(ptx: str, sm: int, version: tuple[int, int] | None = None) -> Translated:
    """``ptx`` for ``sm``. ``version``: the newest PTX that the assembler reads."""
    clusters = _CLUSTERS.search(ptx)
    if clusters is not None and lacked("barrier.cluster.arrive", 0, sm) is not None:
        raise Unsupported(f"{clusters[0]} (clusters) cannot be spelled out for {target(sm).label}.")
    counts: Counter[str] = Counter()
    parts, done = [], 0
    for found in instructions(ptx):
        form = lacked(found.instruction.opcode, len(found.instruction.operands), sm)
        if form is None:
            continue
        counts[form.name] += 1
        parts += [ptx[done : found.start], _block(found.instruction, sm)]
        done = found.end
    text = _TARGET.sub(f".target {target_name(sm)}", "".join([*parts, ptx[done:]]), count=1)
    return Translated(_with_version(text, sm, version), counts)


def _block(instruction: PtxInstruction, sm: int) -> str:
    """A block of its own, so that its registers meet no others."""
    lines = list(_spell(instruction, sm))
    return "\n".join(["{", *lines, "}"]) if lines else ""


def _spell(instruction: PtxInstruction, sm: int) -> Iterator[str]:
    form = lacked(instruction.opcode, len(instruction.operands), sm)
    assert form is not None  # whoever asks has seen that it is lacking
    spelling = SPELLINGS.get(form.name)
    if spelling is None:
        raise Unsupported(f"{instruction.opcode} ({form.name}) cannot be spelled out for {target(sm).label}.")
    try:
        lines = spelling(instruction)
    except (ValueError, BadPtx) as error:
        raise Unsupported(f"{instruction} cannot be spelled out for {target(sm).label}: {error}") from None
    for line in lines:
        if line.startswith("."):
            yield line
            continue
        part = parse(line)
        guarded = PtxInstruction(part.opcode, part.operands, instruction.guard)
        lacking = lacked(part.opcode, len(part.operands), sm) is not None
        yield _block(guarded, sm) if lacking else str(guarded)


def _with_version(ptx: str, sm: int, newest: tuple[int, int] | None) -> str:
    """A version that the assembler reads and that knows the target."""
    found = _VERSION.search(ptx)
    if found is None:
        return ptx
    said = int(found[1]), int(found[2])
    version = max(said if newest is None else min(said, newest), oldest_ptx(sm))
    return ptx if version == said else _VERSION.sub(f".version {version[0]}.{version[1]}", ptx, count=1)
