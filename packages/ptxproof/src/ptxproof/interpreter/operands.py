"""How an instruction reads and writes its operands."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import numpy as np

from ptxproof.errors import NotInterpreted
from ptxproof.interpreter.lanes import Lanes, Mask
from ptxproof.interpreter.numbers import FLOATS, SIGNED, UNSIGNED, Array, bits_of, from_bf16, to_bf16
from ptxproof.interpreter.program import PtxProgram
from ptxproof.ptx import PtxInstruction, vector

Read = Callable[[Lanes, Mask], Array]
Write = Callable[[Lanes, Array, Mask], None]
Step = Callable[[Lanes, Mask], None]
"""One instruction over the active lanes."""
_ADDRESS = re.compile(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+))?\s*\]")
_FLOAT32 = re.compile(r"0[fF]([0-9a-fA-F]{8})")
_FLOAT64 = re.compile(r"0[dD]([0-9a-fA-F]{16})")


class Operands:
    """Of one program. ``constants``: where its global variables are."""

    def __init__(self, program: PtxProgram, constants: dict[str, int]) -> None:
        self._program = program
        self.sm = program.sm
        self._symbols = {**program.symbols, **constants}

    def read(self, operand: str, bits: int) -> Read:
        """An operand's bits, unsigned."""
        if operand in self._program.places:
            place = self._program.places[operand]
            return lambda lanes, active: lanes.get(place, active)
        if operand.startswith("!"):
            inner = self.read(operand[1:].strip(), bits)
            return lambda lanes, active: ~inner(lanes, active)
        if operand.startswith("%"):
            return lambda lanes, active: lanes.special(operand)
        number = np.array([self._number(operand, bits)], UNSIGNED[bits])
        return lambda lanes, active: number

    def read_unset(self, operand: str, bits: int) -> Read:
        """As ``read``; a register that was not written is garbage and no error."""
        if operand not in self._program.places:
            return self.read(operand, bits)
        place = self._program.places[operand]
        return lambda lanes, active: lanes.get_unset(place)

    def _number(self, operand: str, bits: int) -> int:
        if operand in self._symbols:
            return self._symbols[operand]
        for pattern in (_FLOAT32, _FLOAT64):
            if found := pattern.fullmatch(operand):
                return int(found[1], 16)
        try:
            return int(operand.rstrip("U"), 0) & ((1 << bits) - 1)
        except ValueError:
            raise NotInterpreted(f"The operand {operand!r} is not known.") from None

    def typed(self, operand: str, kind: str) -> Read:
        """An operand as numbers of its type. Of a wider register these are the lowest bits."""
        bits = bits_of(kind)
        read = self.read(operand, bits)
        if self._program.registers.get(operand, bits) > bits:
            whole, narrow = read, UNSIGNED[bits]
            read = lambda lanes, active: whole(lanes, active).astype(narrow)
        if kind == "bf16":
            return lambda lanes, active: from_bf16(read(lanes, active))
        dtype = number_type(kind)
        return lambda lanes, active: read(lanes, active).view(dtype)

    def write(self, operand: str, kind: str | None = None) -> Write:
        """Into a register; numbers of ``kind`` as their bits, widened to the register."""
        if operand == "_":
            return lambda lanes, value, active: None
        place = self._program.places[operand]
        dtype = UNSIGNED[self._program.registers[operand]]
        if kind is None:
            return lambda lanes, value, active: lanes.put(place, value, active)
        if kind == "bf16":
            return lambda lanes, value, active: lanes.put(place, to_bf16(value), active)
        if bits_of(kind) == self._program.registers[operand]:
            return lambda lanes, value, active: lanes.put(place, value.view(dtype), active)
        return lambda lanes, value, active: lanes.put(place, value.astype(dtype), active)

    def place(self, operand: str) -> int:
        """The number of a register."""
        return self._program.places[operand]

    def address(self, operand: str, bits: int) -> Read:
        """``[%rd1 + 16]``"""
        found = _ADDRESS.fullmatch(operand)
        if found is None:
            raise NotInterpreted(f"The address {operand!r} is not known.")
        base, offset = self.read(found[1], bits), int(found[2] or "0", 0)
        if not offset:
            return base
        added = np.array([offset & ((1 << bits) - 1)], UNSIGNED[bits])
        return lambda lanes, active: base(lanes, active) + added

    def list_of(self, operand: str) -> list[str]:
        return vector(operand) if operand.startswith("{") else [operand]


@cache
def number_type(kind: str) -> type[np.generic]:
    """NumPy's type for ``s32``, ``f64``, ``b16`` …"""
    if kind in FLOATS:
        return FLOATS[kind]
    return SIGNED[bits_of(kind)] if kind.startswith("s") else UNSIGNED[bits_of(kind)]


def elementwise(write: Write, function: Callable[..., Array], *reads: Read) -> Step:
    def step(lanes: Lanes, active: Mask) -> None:
        write(lanes, function(*(read(lanes, active) for read in reads)), active)

    return step


def unknown(instruction: PtxInstruction) -> NotInterpreted:
    return NotInterpreted(f"{instruction.opcode} is not interpreted.")
