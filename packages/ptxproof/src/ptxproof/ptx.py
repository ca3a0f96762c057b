"""PTX as text in which the instructions are found: what translating it starts from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from ptxproof.errors import BadPtx


@dataclass(frozen=True)
class PtxInstruction:
    """``@%p1 add.f32 %r1, %r2, %r3;``"""

    opcode: str
    operands: tuple[str, ...]
    guard: str | None = None
    """The predicate, with ``!`` where it is negated."""

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)};" if self.operands else f"{guard}{self.opcode};"


@dataclass(frozen=True)
class PtxStatement:
    """An instruction and its place in the text, including the semicolon."""

    start: int
    end: int
    instruction: PtxInstruction


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Declared:
    """``.reg .b32 %r<4>, %s;``: the registers' names, one by one, and their type."""

    kind: str
    names: tuple[str, ...]


class Scope(Enum):
    """A block of its own: registers that are declared in it are seen nowhere else."""

    OPENS = "{"
    CLOSES = "}"


Statement = PtxStatement | Label | Declared | Scope

_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_SKIPPED = re.compile(r"\s+|//[^\n]*|/\*.*?\*/|\.(?:loc|file)\b[^\n]*", re.DOTALL)
_LABEL = re.compile(r"([\w$]+):(?!:)")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+([^;]*);")
_DIRECTIVE = re.compile(r"\.[a-z][^;]*;")
_STATEMENT = re.compile(r"(?:@(?P<guard>!?\s*[%\w$]+)\s+)?(?P<opcode>[a-z][\w.:]*)(?P<operands>[^;]*);", re.DOTALL)


def statements(ptx: str) -> Iterator[Statement]:
    """The body of the one kernel in ``ptx``, in order. Other directives than ``.reg`` are passed over."""
    entry = _ENTRY.search(ptx)
    if entry is None:
        raise BadPtx("There is no .entry in this PTX.")
    at = ptx.index("{", entry.end()) + 1
    depth = 1
    while depth:
        if skipped := _SKIPPED.match(ptx, at):
            at = skipped.end()
        elif ptx[at : at + 1] in ("{", "}"):
            scope = Scope(ptx[at])
            depth += 1 if scope is Scope.OPENS else -1
            at += 1
            if depth:
                yield scope
        elif label := _LABEL.match(ptx, at):
            yield Label(label[1])
            at = label.end()
        elif registers := _REGISTERS.match(ptx, at):
            yield Declared(registers[1], tuple(_register_names(registers[2])))
            at = registers.end()
        elif directive := _DIRECTIVE.match(ptx, at):
            at = directive.end()
        elif found := _STATEMENT.match(ptx, at):
            yield PtxStatement(at, found.end(), _instruction(found))
            at = found.end()
        else:
            line = ptx.count("\n", 0, at) + 1
            raise BadPtx(f"Line {line} of the PTX is no instruction: {ptx[at : at + 60]!r}.")


def instructions(ptx: str) -> Iterator[PtxStatement]:
    """The instructions of the one kernel in ``ptx``, in order."""
    return (statement for statement in statements(ptx) if isinstance(statement, PtxStatement))


def _register_names(text: str) -> Iterator[str]:
    for name in split(text):
        many = re.fullmatch(r"(.*)<(\d+)>", name)
        yield from ([f"{many[1]}{number}" for number in range(int(many[2]))] if many else [name])


def parse(statement: str) -> PtxInstruction:
    """One instruction, with its semicolon."""
    found = _STATEMENT.fullmatch(statement.strip())
    if found is None:
        raise BadPtx(f"{statement!r} is no instruction.")
    return _instruction(found)


def _instruction(found: re.Match[str]) -> PtxInstruction:
    guard = found["guard"]
    operands = found["operands"]
    if "//" in operands:
        operands = re.sub(r"//[^\n]*", "", operands)
    return PtxInstruction(found["opcode"], tuple(split(operands)), guard.replace(" ", "") if guard else None)


def split(operands: str) -> list[str]:
    """Operands at the commas that are in no bracket: ``{%r1, %r2}, [%rd1 + 4], 0`` are three."""
    if "{" not in operands and "(" not in operands and "[" not in operands:
        parts = [part.strip() for part in operands.split(",")]
        return parts if any(parts) else []
    parts, depth, start = [], 0, 0
    for at, char in enumerate(operands):
        depth += (char in "{[(") - (char in "}])")
        if char == "," and not depth:
            parts.append(operands[start:at])
            start = at + 1
    parts = [part.strip() for part in [*parts, operands[start:]]]
    return parts if any(parts) else []


def vector(operand: str) -> list[str]:
    """The parts of ``{%r1, %r2}``."""
    if not operand.startswith("{"):
        raise BadPtx(f"{operand!r} is no vector.")
    return split(operand[1:-1])
