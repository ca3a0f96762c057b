"""PTX as text in which the instructions are found: what translating it starts from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from microscale.errors import MicroscaleError


class BadPtx(MicroscaleError):
    """Text that is not the PTX of one kernel as Triton writes it."""


@dataclass(frozen=True)
class Instruction:
    """``@%p1 add.f32 %r1, %r2, %r3;``"""

    opcode: str
    operands: tuple[str, ...]
    guard: str | None = None
    """The predicate, with ``!`` where it is negated."""

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)};" if self.operands else f"{guard}{self.opcode};"


@dataclass(frozen=True)
class Found:
    """An instruction and where in the text it stands, the semicolon included."""

    start: int
    end: int
    instruction: Instruction


_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_SKIPPED = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/|[{}]|[\w$]+:(?!:)|\.(?:loc|file)\b[^\n]*|\.[a-z][^;]*;)", re.DOTALL)
_STATEMENT = re.compile(
    r"(?:@(?P<guard>!?\s*[%\w$]+)\s+)?(?P<opcode>[a-z][\w.:]*)(?P<operands>[^;]*);", re.DOTALL
)


def instructions(ptx: str) -> Iterator[Found]:
    """The instructions of the one kernel in ``ptx``, in order."""
    entry = _ENTRY.search(ptx)
    if entry is None:
        raise BadPtx("There is no .entry in this PTX.")
    at = ptx.index("{", entry.end())
    end = _end_of_body(ptx, at)
    while at < end:
        if skipped := _SKIPPED.match(ptx, at):
            at = skipped.end()
            continue
        found = _STATEMENT.match(ptx, at)
        if found is None:
            line = ptx.count("\n", 0, at) + 1
            raise BadPtx(f"Line {line} of the PTX is no instruction: {ptx[at : at + 60]!r}.")
        yield Found(at, found.end(), _instruction(found))
        at = found.end()


def parse(statement: str) -> Instruction:
    """One instruction, with its semicolon."""
    found = _STATEMENT.fullmatch(statement.strip())
    if found is None:
        raise BadPtx(f"{statement!r} is no instruction.")
    return _instruction(found)


def _instruction(found: re.Match[str]) -> Instruction:
    guard = found["guard"]
    operands = re.sub(r"//[^\n]*", "", found["operands"])
    return Instruction(found["opcode"], tuple(split(operands)), guard.replace(" ", "") if guard else None)


def split(operands: str) -> list[str]:
    """Operands at the commas that are in no bracket: ``{%r1, %r2}, [%rd1 + 4], 0`` are three."""
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


def _end_of_body(ptx: str, start: int) -> int:
    depth = 0
    for brace in re.finditer(r"//[^\n]*|[{}]", ptx[start:]):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if not depth:
            return start + brace.end()
    raise BadPtx("The kernel's body does not end.")
