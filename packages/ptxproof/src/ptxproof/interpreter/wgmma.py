"""``wgmma``: products of four warps together, of which B, and A if it is not in registers, come from shared memory.

Where a number is in shared memory a descriptor says (PTX manual, "Matrix-Descriptor-Format" and "Strides"; CUTLASS has
the same layouts above ``mma_traits_sm90_gmma``). Rows lie ``swizzle`` bytes apart in groups of eight, and the 16-byte
chunks of a row are exchanged by exclusive or with bits of the address. D, and A in registers, lie as those of ``mma``,
each warp having 16 of the 64 rows.

A product is computed at once, but counts as under way until the warp has waited for its group: until then no thread
may access its registers or store to the shared memory that it reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ptxproof.errors import InterpretError, NotInterpreted
from ptxproof.interpreter.access import spread
from ptxproof.interpreter.lanes import WARP, Lanes, Mask
from ptxproof.interpreter.matrix import left
from ptxproof.interpreter.numbers import UNSIGNED, Array
from ptxproof.interpreter.operands import Operands, Read, Step, unknown
from ptxproof.interpreter.products import WIDTH, Rows, dot_add
from ptxproof.matrix_units import MmaUnit, summation
from ptxproof.ptx import PtxInstruction, vector

_FORM = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k(?P<k>\d+)\.f32\.(?P<a>\w+)\.(?P<b>\w+)")
_SWIZZLES = (16, 128, 64, 32)
"""Bytes of a row, by the descriptor's two highest bits; 16: none."""
GROUP = 4
"""Warps."""

Codes = Callable[[Lanes, Mask, Array], Array]
"""``[groups of warps, rows, k]`` of one operand."""


@dataclass(frozen=True)
class _Shape:
    rows: int
    """M or N."""
    k: int
    width: int
    """Bits of a number."""
    transposed: bool
    """Rows, and not K, are neighbours in memory."""


def build_wgmma(ops: Operands, instruction: PtxInstruction) -> Step:
    name = instruction.opcode.split(".")[1]
    if name == "fence":
        return lambda lanes, active: lanes.products.fence(active)
    if name == "commit_group":
        return lambda lanes, active: lanes.products.commit(lanes.warps(active))
    if name == "wait_group":
        pending = int(instruction.operands[0], 0)
        return lambda lanes, active: lanes.products.wait(lanes.shared, pending, lanes.warps(active))
    found = _FORM.fullmatch(instruction.opcode)
    if found is None or found["a"] not in WIDTH or WIDTH[found["a"]] != WIDTH.get(found["b"]):
        raise unknown(instruction)
    return _product(ops, instruction, found)


def _product(ops: Operands, instruction: PtxInstruction, found: re.Match[str]) -> Step:
    kinds, n, k = (found["a"], found["b"]), int(found["n"]), int(found["k"])
    width = WIDTH[kinds[0]]
    how = summation(ops.sm, MmaUnit.WGMMA_16 if width == 16 else MmaUnit.WGMMA_8)
    targets, a, b, keeps, *flags = instruction.operands
    if flags[:2] != ["1", "1"]:
        raise unknown(instruction)
    turns = [flag == "1" for flag in flags[2:]]
    in_registers = a.startswith("{")
    turned_b = bool(turns) and turns[-1]
    turned_a = len(turns) == 2 and turns[0]
    names = vector(targets)
    reads, writes = [ops.read(name, 32) for name in names], [ops.write(name) for name in names]
    left_codes = _registers(ops, a, kinds[0]) if in_registers else _shared(ops, a, _Shape(64, k, width, turned_a))
    right_codes = _shared(ops, b, _Shape(n, k, width, turned_b))
    keep = ops.read(keeps, 1)
    touched = frozenset(map(ops.place, names)), frozenset(map(ops.place, vector(a) if in_registers else ()))

    def addends(lanes: Lanes, active: Mask, warps: Array) -> Array:
        """D as it was, or zeros."""
        undefined = lanes.taken_undefined()
        kept = lanes.wide(keep(lanes, active)).reshape(-1, WARP)[warps, 0]
        addend = np.zeros((len(warps), 16, n), np.float32)
        if kept.any():
            words = np.stack([lanes.wide(read(lanes, active)).reshape(-1, 8, 4)[warps] for read in reads])
            parts = words.view(np.float32).reshape(n // 8, 2, 2, -1, 8, 4).transpose(3, 1, 4, 0, 5, 2)
            addend = np.where(kept[:, None, None], parts.reshape(-1, 16, n), addend)
        lanes.undefined = lanes.wide(undefined | lanes.taken_undefined())
        lanes.undefined_in_warps()
        return addend

    def step(lanes: Lanes, active: Mask) -> None:
        warps = _groups(lanes, active)
        with lanes.products.begun(*touched, active):
            left_rows = Rows.decode(left_codes(lanes, active, warps).reshape(len(warps), 16, k), kinds[0])
            right_rows = Rows.decode(np.repeat(right_codes(lanes, active, warps), GROUP, 0), kinds[1])
            total = dot_add(left_rows, right_rows, addends(lanes, active, warps), how)
            words = total.reshape(-1, 2, 8, n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(len(names), -1)
            selected = (warps[:, None] * WARP + np.arange(WARP)).ravel()
            for write, values in zip(writes, words.view(np.uint32), strict=True):
                write(lanes, spread(lanes, values, selected, active), active)
        lanes.products.under_way(lanes.num, warps)

    return step


def _groups(lanes: Lanes, active: Mask) -> Array:
    """The active warps, in whole groups of four."""
    warps = lanes.warps(active)
    if len(warps) % GROUP or (warps.reshape(-1, GROUP)[:, 0] % GROUP).any():
        raise InterpretError(f"{lanes.where}: a part of a group of four warps.")
    if (warps.reshape(-1, GROUP) != warps.reshape(-1, GROUP)[:, :1] + np.arange(GROUP)).any():
        raise InterpretError(f"{lanes.where}: warps of different groups.")
    return warps


def _registers(ops: Operands, operand: str, kind: str) -> Codes:
    reads: list[Read] = [ops.read(name, 32) for name in vector(operand)]

    def codes(lanes: Lanes, active: Mask, warps: Array) -> Array:
        return left(np.stack([lanes.wide(read(lanes, active)).reshape(-1, 8, 4)[warps] for read in reads]), kind)

    return codes


def _shared(ops: Operands, operand: str, shape: _Shape) -> Codes:
    read = ops.read(operand, 64)

    def codes(lanes: Lanes, active: Mask, warps: Array) -> Array:
        described = lanes.wide(read(lanes, active)).reshape(-1, WARP)[warps].reshape(-1, GROUP * WARP)
        lanes.refuse_undefined("a descriptor", active)
        if (described != described[:, :1]).any():
            raise InterpretError(f"{lanes.where}: the warps of a group have different descriptors.")
        addresses = np.stack([chunk_addresses(int(each), shape) for each in described[:, 0]])
        chunks = lanes.products.load(lanes.shared, addresses.reshape(len(addresses), -1), warps.reshape(-1, GROUP))
        numbers = chunks.view(UNSIGNED[shape.width]).reshape(*addresses.shape[:2], -1)
        return numbers.swapaxes(1, 2) if shape.transposed else numbers

    return codes


def chunk_addresses(descriptor: int, shape: _Shape) -> Array:
    """Where the 16-byte chunks of a matrix are: ``[rows, chunks of K]``, or turned ``[k, chunks of rows]``."""
    start = (descriptor & 0x3FFF) << 4
    leading, stride = (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    swizzle = _SWIZZLES[descriptor >> 62]
    if descriptor >> 49 & 7:
        raise NotInterpreted("A matrix descriptor with a base offset is not interpreted.")
    each = 128 // shape.width  # numbers of a chunk
    lines, across = (shape.k, shape.rows // each) if shape.transposed else (shape.rows, shape.k // each)
    line, chunk = np.arange(lines)[:, None], np.arange(across)[None, :]
    in_row = swizzle // 16  # chunks of one row
    if swizzle == 16 and shape.transposed:
        far = line // 8 * leading + chunk * stride
    elif swizzle == 16 or shape.transposed:
        far = line // 8 * stride + chunk // in_row * leading
    else:
        far = line // 8 * stride + chunk // in_row * swizzle * 8
    address = start + far + line % 8 * swizzle + chunk % in_row * 16
    exchanged: Array = address ^ ((address >> 7 & (in_row - 1)) << 4)
    return exchanged
