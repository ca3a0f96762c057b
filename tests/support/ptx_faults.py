"""Faults that are put into a kernel's PTX: each gives the text of a kernel that is wrong in one way."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

from ptxproof import TritonKernel
from ptxproof.interpreter.launched import Edit
from ptxproof.ptx import PtxInstruction, PtxStatement, instructions, vector

Fault = Callable[[TritonKernel, str], str]
Run = Callable[..., tuple[Tensor, Tensor]]
"""What a kernel gives, and what it should."""
Spelling = Callable[[PtxInstruction], list[str]]
"""An instruction, or several in its place."""


@dataclass(frozen=True)
class Seeded:
    """A fault in one function of what ``run`` starts."""

    name: str
    run: Run
    function: str
    fault: Fault

    def __str__(self) -> str:
        return f"{self.run.__name__}: {self.name} in {self.function}"


class NoSuchPlace(AssertionError):
    """The kernel has nothing that this fault could spoil: the test is out of date."""


def only_in(function: str, fault: Fault) -> Edit:
    """The fault in kernels of this name; others stay as they are."""
    return lambda kernel, ptx: fault(kernel, ptx) if kernel.short_name == function else ptx


def rewritten(ptx: str, found: Sequence[PtxStatement], spell: Spelling) -> str:
    if not found:
        raise NoSuchPlace("no instruction to spoil")
    parts, done = [], 0
    for each in found:
        parts += [ptx[done : each.start], "{ ", " ".join(spell(each.instruction)), " }"]
        done = each.end
    return "".join([*parts, ptx[done:]])


def matching(ptx: str, pattern: str) -> list[PtxStatement]:
    return [each for each in instructions(ptx) if re.match(pattern, str(each.instruction))]


def removed(pattern: str, which: int = 0) -> Fault:
    """One instruction is left out."""

    def fault(kernel: TritonKernel, ptx: str) -> str:
        found = [each for each in instructions(ptx) if re.match(pattern, each.instruction.opcode)]
        if which >= len(found):
            raise NoSuchPlace(f"{pattern} occurs {len(found)} times")
        return ptx[: found[which].start] + ptx[found[which].end :]

    return fault


def barrier_before_count_removed(kernel: TritonKernel, ptx: str) -> str:
    """No barrier between a kernel's stores and the atomic by which its programs count."""
    found = list(instructions(ptx))
    count = next((at for at, each in enumerate(found) if each.instruction.opcode.startswith("atom.global")), None)
    before = [each for each in found[:count] if each.instruction.opcode.startswith(("st.global", "bar.sync"))]
    barriers = list(takewhile(lambda each: each.instruction.opcode == "bar.sync", reversed(before)))
    if count is None or not barriers:
        raise NoSuchPlace("no barrier before an atomic")
    for each in barriers:
        ptx = ptx[: each.start] + ptx[each.end :]
    return ptx


def relaxed(kernel: TritonKernel, ptx: str) -> str:
    """Atomics that count, and order nothing."""
    if ".acq_rel." not in ptx:
        raise NoSuchPlace("no atomic that releases and acquires")
    return ptx.replace(".acq_rel.", ".relaxed.")


def loads_of(kernel: TritonKernel, ptx: str, parameter: str) -> list[PtxStatement]:
    """Loads and copies from addresses that come from a parameter. Constants are none of the PTX's parameters."""
    given = [name for name, kind in kernel.signature.items() if kind != "constexpr"]
    number = given.index(parameter)
    derived: set[str] = set()
    everything = list(instructions(ptx))
    for _ in range(3):  # addresses are carried round a loop
        for each in everything:
            asked = each.instruction
            target, *sources = asked.operands or ("",)
            if asked.opcode.startswith("ld.param"):
                if sources[0].strip("[] ").endswith(f"_param_{number}"):
                    derived.add(target)
            elif target.startswith("%rd") and any(name in derived for name in sources):
                derived.add(target)

    def takes(operand: str) -> bool:
        return operand.strip("[] ").split()[0].split("+")[0] in derived

    return [
        each
        for each in everything
        if (each.instruction.opcode.startswith("ld.global") and takes(each.instruction.operands[1]))
        or (re.match(r"cp\.async\.c[ag]", each.instruction.opcode) and takes(each.instruction.operands[1]))
    ]


def spoiled_loads(parameter: str, spoil: Callable[[str], str]) -> Fault:
    """What is loaded through a parameter is changed, word by word; copies become a load and a store."""

    def spell(asked: PtxInstruction) -> list[str]:
        guard = f"@{asked.guard} " if asked.guard else ""
        if not asked.opcode.startswith("cp.async"):
            names = vector(asked.operands[0]) if asked.operands[0].startswith("{") else [asked.operands[0]]
            return [str(asked), *(spoil(name) for name in names)]
        to, source, size, *given = asked.operands
        words = [f"%fault{at}" for at in range(int(size, 0) // 4)]
        kind = "b32" if len(words) == 1 else f"v{len(words)}.b32"
        register = words[0] if len(words) == 1 else "{" + ", ".join(words) + "}"
        lines = [f".reg .b32 {', '.join(words)};", ".reg .pred %faulty;", *(f"mov.b32 {word}, 0;" for word in words)]
        lines += [f"setp.ne.b32 %faulty, {given[0] if given else 1}, 0;"]
        if asked.guard:
            negated = asked.guard.startswith("!")
            lines += [f"selp.b32 {words[0]}, 1, 0, {asked.guard.lstrip('!')};"]
            lines += [f"setp.{'eq' if negated else 'ne'}.and.b32 %faulty, {words[0]}, 0, %faulty;"]
            lines += [f"mov.b32 {words[0]}, 0;"]
        lines += [f"@%faulty ld.global.{kind} {register}, {source};", *(spoil(word) for word in words)]
        return [*lines, f"{guard}st.shared.{kind} {to}, {register};"]

    return lambda kernel, ptx: rewritten(ptx, loads_of(kernel, ptx, parameter), spell)


def nibbles_swapped(parameter: str) -> Fault:
    def spoil(word: str) -> str:
        return (
            f"{{ .reg .b32 %low, %high; and.b32 %low, {word}, 252645135; shl.b32 %low, %low, 4; "
            f"shr.u32 %high, {word}, 4; and.b32 %high, %high, 252645135; or.b32 {word}, %low, %high; }}"
        )

    return spoiled_loads(parameter, spoil)


def bytes_swapped(parameter: str) -> Fault:
    return spoiled_loads(parameter, lambda word: f"prmt.b32 {word}, {word}, 0, 8961;")


def of_another_lane(parameter: str, distance: int) -> Fault:
    """What is loaded through a parameter is the number of the lane ``distance`` away."""
    return spoiled_loads(parameter, lambda word: f"shfl.sync.bfly.b32 {word}, {word}, {distance}, 31, -1;")


def mask_left_out(parameter: str) -> Fault:
    """Loads through a parameter take what they should not."""

    def spell(asked: PtxInstruction) -> list[str]:
        return [str(PtxInstruction(asked.opcode, asked.operands[:3]))]

    return lambda kernel, ptx: rewritten(ptx, loads_of(kernel, ptx, parameter), spell)


def always_visible(kernel: TritonKernel, ptx: str) -> str:
    """No score is masked."""
    found = matching(ptx, r"selp\.f32 \S+ \S+ 0fFF800000")
    return rewritten(ptx, found, lambda asked: [f"mov.b32 {asked.operands[0]}, {asked.operands[1]};"])


def tile_left_out(kernel: TritonKernel, ptx: str) -> str:
    """The first turn of the last loop with products leaves all of them out; without a loop, the first product."""
    products = [each for each in instructions(ptx) if each.instruction.opcode.startswith("mma.sync")]
    loop = [found for found in re.finditer(r"^(\$\w+):", ptx, re.MULTILINE) if _closes(ptx, found)]
    inside = [(label, [each for each in products if label.end() < each.start < _closes(ptx, label)]) for label in loop]
    inside = [(label, found) for label, found in inside if found]

    def kept(asked: PtxInstruction) -> list[str]:
        pairs = zip(vector(asked.operands[0]), vector(asked.operands[3]), strict=True)
        return [f"mov.b32 {to}, {addend};" for to, addend in pairs]

    if not inside:
        return rewritten(ptx, products[:1], kept)
    label, found = inside[-1]

    def spell(asked: PtxInstruction) -> list[str]:
        moves = [f"@!%fault_later {line}" for line in kept(asked)]
        return [f"@%fault_later {asked}", *moves]

    spoiled = rewritten(ptx, found, spell)
    count = "add.u32 %fault_turn, %fault_turn, 1; setp.gt.u32 %fault_later, %fault_turn, 1;"
    spoiled = spoiled[: label.end()] + count + spoiled[label.end() :]
    body = spoiled.index("{", spoiled.index(".reqntid")) + 1
    declared = "\n.reg .b32 %fault_turn; .reg .pred %fault_later; mov.b32 %fault_turn, 0;\n"
    return spoiled[:body] + declared + spoiled[body:]


def _closes(ptx: str, label: re.Match[str]) -> int:
    """Where the loop that begins at a label ends; 0: it is none."""
    name = re.escape(label[1])
    back = list(re.finditer(rf"\bbra(?:\.uni)?\s+{name};", ptx[label.end() :]))
    return label.end() + back[-1].start() if back else 0
