"""One kernel as the interpreter reads it: parameters, registers, and instructions in basic blocks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ptxproof.errors import NotInterpreted
from ptxproof.ptx import Declared, Label, PtxInstruction, PtxStatement, Scope, Statement, statements, vector

_WIDTHS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64}
_NAME = re.compile(r"%?[A-Za-z_$][\w$]*")
_ENDS_BLOCK = ("bra", "brx", "ret", "exit", "bar", "barrier")
WAITS = "mbarrier.try_wait"
_LOOKS = re.compile(r"ld\.(?:acquire|relaxed|volatile)\.(?:gpu\.|sys\.)?(?:global\.)?[a-z]\d+$")


@dataclass(frozen=True)
class ProgramLine:
    """An instruction and its line."""

    instruction: PtxInstruction
    line: int


@dataclass
class PtxProgram:
    """What ``PtxProgram.parse`` found."""

    name: str
    sm: int
    threads: int
    """Of one block."""
    params: list[tuple[str, int]]
    """Names and bytes."""
    registers: dict[str, int] = field(default_factory=dict)
    """Names and bits; a register of an inner scope has the scope's number in its name."""
    places: dict[str, int] = field(default_factory=dict)
    """Registers by number."""
    symbols: dict[str, int] = field(default_factory=dict)
    """Addresses of shared and local variables."""
    constants: dict[str, bytes] = field(default_factory=dict)
    """Contents of global variables."""
    local_bytes: int = 0
    blocks: list[list[ProgramLine]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Labels that ``brx.idx`` chooses from."""

    @cached_property
    def looks(self) -> bool:
        """Whether a program looks for what another one does, and so may wait for it."""
        return any(looks(block[-1].instruction) for block in self.blocks)

    @cached_property
    def product_registers(self) -> frozenset[int]:
        """Those that a ``wgmma`` reads or writes, by number."""
        instruction = (placed.instruction for block in self.blocks for placed in block)
        products = [each for each in instruction if each.opcode.startswith("wgmma.mma_async")]
        listed = [text for each in products for text in each.operands[:2] if text.startswith("{")]
        return frozenset(self.places[name] for text in listed for name in vector(text))

    @classmethod
    def parse(cls, ptx: str) -> PtxProgram:
        text = re.sub(r"//[^\n]*", "", ptx)
        entry = re.search(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{", text)
        threads = re.search(r"\.reqntid\s+(\d+)", entry[3]) if entry else None
        target = re.search(r"\.target\s+sm_(\d+)", text)
        if entry is None or threads is None or target is None:
            raise NotInterpreted("The PTX has no .target, or no .entry with .reqntid.")
        params = [(part.split()[-1], _param_bytes(part)) for part in entry[2].split(",") if part.strip()]
        program = cls(entry[1], int(target[1]), int(threads[1]), params)
        program._read_variables(text)
        program._read_body(ptx)
        return program

    def _read_variables(self, text: str) -> None:
        self.symbols |= dict.fromkeys(re.findall(r"\.extern\s+\.shared[^;]*?([\w$]+)\[\];", text), 0)
        for name, size, content in re.findall(
            r"\.global\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[(\d+)\]\s*=\s*\{([^}]*)\}", text
        ):
            self.constants[name] = bytes(int(value) for value in content.split(",")).ljust(int(size), b"\0")
        for name, targets in re.findall(r"([\w$]+):\s*\.branchtargets\s+([^;]*);", text):
            self.tables[name] = tuple(target.strip() for target in targets.split(","))
        for name, size in re.findall(r"\.local\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[(\d+)\];", text):
            self.symbols[name] = self.local_bytes
            self.local_bytes += (int(size) + 15) // 16 * 16

    def _read_body(self, ptx: str) -> None:
        found = list(statements(ptx))
        labels = _labels_of_scopes(found)
        scopes: list[dict[str, str]] = [{}]
        num_scopes, line, counted = 0, 1, 0
        block: list[ProgramLine] = []
        for statement in found:
            if statement is Scope.OPENS:
                num_scopes += 1
                scopes.append({name: f"{name}@{num_scopes}" for name in labels.get(num_scopes, ())})
            elif statement is Scope.CLOSES:
                scopes.pop()
            elif isinstance(statement, Declared):
                for name in statement.names:
                    scopes[-1][name] = name if len(scopes) == 1 else f"{name}@{num_scopes}"
                    self._declare(scopes[-1][name], statement.kind)
            elif isinstance(statement, Label):
                if block:
                    self.blocks.append(block)
                    block = []
                self.labels[scopes[-1].get(statement.name, statement.name)] = len(self.blocks)
            elif isinstance(statement, PtxStatement):
                line += ptx.count("\n", counted, statement.start)
                counted = statement.start
                instruction = statement.instruction
                if len(scopes) > 1:
                    instruction = _renamed(instruction, scopes)
                if block and (instruction.opcode.startswith(WAITS) or looks(instruction)):  # it may be run again
                    self.blocks.append(block)
                    block = []
                block.append(ProgramLine(instruction, line))
                if _ends_block(instruction.opcode) or looks(instruction):
                    self.blocks.append(block)
                    block = []
        if block:
            self.blocks.append(block)

    def _declare(self, name: str, kind: str) -> None:
        bits = _WIDTHS.get(kind) or int(re.sub(r"\D", "", kind))
        self.places[name] = len(self.registers)
        self.registers[name] = bits


def looks(instruction: PtxInstruction) -> bool:
    """A load of a number that another program may be about to change."""
    return instruction.guard is None and _LOOKS.match(instruction.opcode) is not None


def _labels_of_scopes(found: Sequence[Statement]) -> dict[int, list[str]]:
    """The labels of each inner scope, by its number: a branch may name one that comes after it."""
    labels: dict[int, list[str]] = {}
    inside: list[int] = []
    opened = 0
    for statement in found:
        if statement is Scope.OPENS:
            opened += 1
            inside.append(opened)
        elif statement is Scope.CLOSES:
            inside.pop()
        elif isinstance(statement, Label) and inside:
            labels.setdefault(inside[-1], []).append(statement.name)
    return labels


def _ends_block(opcode: str) -> bool:
    if opcode.startswith("bar.warp"):
        return False
    return opcode.partition(".")[0] in _ENDS_BLOCK or opcode.startswith(WAITS)


def _param_bytes(text: str) -> int:
    size = re.search(r"\.[bufs](\d+)", text)
    assert size is not None
    return int(size[1]) // 8


def _renamed(instruction: PtxInstruction, scopes: list[dict[str, str]]) -> PtxInstruction:
    def name(found: re.Match[str]) -> str:
        return next((scope[found[0]] for scope in reversed(scopes) if found[0] in scope), found[0])

    operands = tuple(_NAME.sub(name, operand) for operand in instruction.operands)
    guard = _NAME.sub(name, instruction.guard) if instruction.guard else None
    return PtxInstruction(instruction.opcode, operands, guard)
