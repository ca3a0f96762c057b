"""``mma.sync``: where each lane's numbers are in the matrices (PTX manual, "Matrix Fragments"). ``products`` sums them.

Lane ``4 g + t`` is lane ``t`` of group ``g``. Of A, ``[16, k]``, registers 0 and 1 hold rows ``g`` and ``g + 8`` of the
first half of k, 2 and 3 of the second; of B, ``[k, 8]``, registers 0 and 1 hold column ``g`` of both halves. In each
half lane ``t`` has ``k / 8`` neighbours from ``t k / 8`` on. C and D hold rows ``g`` and ``g + 8``, columns ``2 t`` and
``2 t + 1``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from ptxproof.errors import NotInterpreted
from ptxproof.instructions import NVFP4_MMA
from ptxproof.interpreter.access import spread
from ptxproof.interpreter.lanes import WARP, Lanes, Mask
from ptxproof.interpreter.numbers import UNSIGNED, Array
from ptxproof.interpreter.operands import Operands, Read, Step, unknown
from ptxproof.interpreter.products import NAN, WIDTH, Rows, dot_add, grouped_dot_add
from ptxproof.matrix_units import MmaUnit, summation
from ptxproof.ptx import PtxInstruction, vector

_PLAIN = re.compile(r"mma\.sync\.aligned\.m16n8k(?P<k>\d+)\.row\.col\.f32\.(?P<a>\w+)\.(?P<b>\w+)\.f32")
_SCALED = re.compile(
    r"mma\.sync\.aligned\.m16n8k32\.row\.col\.kind::mxf8f6f4\.block_scale(?:\.scale_vec::1X)?"
    r"\.f32\.(?P<a>\w+)\.(?P<b>\w+)\.f32\.ue8m0"
)


def build_mma(ops: Operands, instruction: PtxInstruction) -> Step:
    unit, kind_a, kind_b = _form(instruction)
    how = summation(ops.sm, unit)
    writes = [ops.write(name) for name in vector(instruction.operands[0])]
    reads = [[ops.read(name, 32) for name in vector(operand)] for operand in instruction.operands[1:4]]
    scales = None if unit in (MmaUnit.MMA_16, MmaUnit.MMA_8) else _scales(ops, instruction)

    def step(lanes: Lanes, active: Mask) -> None:
        warps = lanes.warps(active)

        def words(sources: Sequence[Read]) -> Array:
            """``[registers, warps, 8, 4]``"""
            return np.stack([lanes.wide(read(lanes, active)).reshape(-1, 8, 4)[warps] for read in sources])

        a, b = Rows.decode(left(words(reads[0]), kind_a), kind_a), Rows.decode(right(words(reads[1]), kind_b), kind_b)
        # [half, column of two, warps, 8, 4] → [warps, 16, 8], and back
        addend = words(reads[2]).view(np.float32).reshape(2, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)
        if scales is None:
            result = dot_add(a, b, addend, how)
        elif unit is MmaUnit.MMA_BLOCK_SCALED_4:
            # UE4M3: the highest bit is not used.
            decoded = (Rows.decode(codes & np.uint8(127), "e4m3") for codes in scales(lanes, active, warps))
            result = grouped_dot_add(a, b, addend, how, *decoded)
        else:
            exponents, valid = _exponents(*scales(lanes, active, warps))
            result = np.where(valid, dot_add(a, b, addend, how, exponents), NAN)
        total = result.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1).view(np.uint32)
        lanes.undefined_in_warps()
        selected = (warps[:, None] * WARP + np.arange(WARP)).ravel()
        for at, write in enumerate(writes):
            write(lanes, spread(lanes, total[at], selected, active), active)

    return step


def _form(instruction: PtxInstruction) -> tuple[MmaUnit, str, str]:
    """The unit, and the types of A and B."""
    if instruction.opcode == NVFP4_MMA:
        return MmaUnit.MMA_BLOCK_SCALED_4, "e2m1", "e2m1"
    plain, scaled = _PLAIN.fullmatch(instruction.opcode), _SCALED.fullmatch(instruction.opcode)
    found = plain or scaled
    if found is None or found["a"] not in WIDTH or found["b"] not in WIDTH:
        raise unknown(instruction)
    kind_a, kind_b = found["a"], found["b"]
    if WIDTH[kind_a] != WIDTH[kind_b] or (plain is not None and int(plain["k"]) * WIDTH[kind_a] != 256):
        raise unknown(instruction)
    unit = MmaUnit.MMA_BLOCK_SCALED if scaled else MmaUnit.MMA_16 if WIDTH[kind_a] == 16 else MmaUnit.MMA_8
    return unit, kind_a, kind_b


def left(words: Array, kind: str) -> Array:
    """The codes of A, ``[warps, 16, k]``, of registers ``[4, warps, 8, 4]``."""
    parts = _codes(words, kind).reshape(2, 2, *words.shape[1:], -1)
    # [half of k, half of rows, warps, g, t, neighbours] → [warps, half of rows, g, half of k, t, neighbours]
    return parts.transpose(2, 1, 3, 0, 4, 5).reshape(words.shape[1], 16, -1)


def right(words: Array, kind: str) -> Array:
    """The codes of B by columns, ``[warps, 8, k]``, of registers ``[2, warps, 8, 4]``."""
    # [half of k, warps, g, t, neighbours] → [warps, g, half of k, t, neighbours]
    return _codes(words, kind).transpose(1, 2, 0, 3, 4).reshape(words.shape[1], 8, -1)


def _codes(words: Array, kind: str) -> Array:
    """The numbers of each word, from its lowest bits on: one more dimension."""
    if kind == "e2m1":
        return words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)
    return np.ascontiguousarray(words).view(UNSIGNED[WIDTH[kind]]).reshape(*words.shape, -1)


def _scales(ops: Operands, instruction: PtxInstruction) -> Callable[[Lanes, Mask, Array], tuple[Array, Array]]:
    """The bytes of each row's scales and of each column's: ``[warps, 16, scales]`` and ``[warps, 8, scales]``.

    A's are in lanes ``2 thread_id`` and the next of each group of four, for rows ``g`` and ``g + 8``; B's in lane
    ``thread_id``. One scale is the byte ``byte_id``, and four are the whole word.
    """
    read_a, read_b = ops.read(instruction.operands[4], 32), ops.read(instruction.operands[6], 32)
    (byte_a, thread_a), (byte_b, thread_b) = (map(int, vector(instruction.operands[at])) for at in (5, 7))
    four = instruction.opcode == NVFP4_MMA
    if four and (byte_a or byte_b):
        raise NotInterpreted(f"{instruction} uses all four bytes, and its byte-id is not 0.")

    def scales(lanes: Lanes, active: Mask, warps: Array) -> tuple[Array, Array]:
        def of_lanes(read: Read) -> Array:
            words = np.ascontiguousarray(lanes.wide(read(lanes, active)).reshape(-1, 8, 4)[warps])
            return words.view(np.uint8).reshape(len(warps), 8, 4, 4)

        a, b = of_lanes(read_a), of_lanes(read_b)
        rows = np.concatenate([a[:, :, 2 * thread_a], a[:, :, 2 * thread_a + 1]], 1)
        columns = b[:, :, thread_b]
        return (rows, columns) if four else (rows[..., [byte_a]], columns[..., [byte_b]])

    return scales


def _exponents(rows: Array, columns: Array) -> tuple[Array, Array]:
    """E8M0 scales: exponents for each row and column, and which of them are numbers (255 is NaN)."""
    columns = columns.swapaxes(1, 2)
    sums: Array = rows.astype(np.int16) + columns - np.int16(254)
    return sums, (rows != 255) & (columns != 255)
