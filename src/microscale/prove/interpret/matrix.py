"""``mma.sync``: where each lane's numbers are in the matrices (PTX manual, "Matrix Fragments"), and their product.

Lane ``4 g + t`` is lane ``t`` of group ``g``. Of A, ``[16, k]``, registers 0 and 1 hold rows ``g`` and ``g + 8`` of the
first half of k, 2 and 3 of the second; of B, ``[k, 8]``, registers 0 and 1 hold column ``g`` of both halves. In each
half lane ``t`` has ``k / 8`` neighbours from ``t k / 8`` on. C and D hold rows ``g`` and ``g + 8``, columns ``2 t`` and
``2 t + 1``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from microscale.prove.interpret import numbers
from microscale.prove.interpret.access import spread
from microscale.prove.interpret.lanes import WARP, Lanes, Mask
from microscale.prove.interpret.numbers import Array
from microscale.prove.interpret.operands import Operands, Read, Step, unknown
from microscale.prove.ptx import Instruction, vector

_PLAIN = re.compile(r"mma\.sync\.aligned\.m16n8k(?P<k>\d+)\.row\.col\.f32\.(?P<a>\w+)\.(?P<b>\w+)\.f32")
_SCALED = re.compile(
    r"mma\.sync\.aligned\.m16n8k32\.row\.col\.kind::mxf8f6f4\.block_scale(?:\.scale_vec::1X)?"
    r"\.f32\.(?P<a>\w+)\.(?P<b>\w+)\.f32\.ue8m0"
)
_DECODED: dict[str, Callable[[Array], Array]] = {
    "bf16": lambda words: numbers.from_bf16(words.view(np.uint16)).astype(np.float64),
    "f16": lambda words: words.view(np.float16).astype(np.float64),
    "e4m3": lambda words: numbers.E4M3[words.view(np.uint8)],
    "e5m2": lambda words: numbers.E5M2[words.view(np.uint8)],
}
_COLUMNS = {"bf16": 16, "f16": 16, "e4m3": 32, "e5m2": 32}


def build_mma(ops: Operands, asked: Instruction) -> Step:
    plain, scaled = _PLAIN.fullmatch(asked.opcode), _SCALED.fullmatch(asked.opcode)
    found = plain or scaled
    if found is None or found["a"] not in _DECODED or found["b"] not in _DECODED:
        raise unknown(asked)
    if plain is not None and int(plain["k"]) != _COLUMNS[plain["a"]]:
        raise unknown(asked)
    kind_a, kind_b = found["a"], found["b"]
    writes = [ops.write(name) for name in vector(asked.operands[0])]
    reads = [[ops.read(name, 32) for name in vector(operand)] for operand in asked.operands[1:4]]
    scales = None if scaled is None else _scales(ops, asked)

    def step(lanes: Lanes, active: Mask) -> None:
        warps = lanes.warps(active)

        def words(sources: Sequence[Read]) -> Array:
            """``[registers, warps, 8, 4]``"""
            return np.stack([lanes.wide(read(lanes, active)).reshape(-1, 8, 4)[warps] for read in sources])

        product = left(words(reads[0]), kind_a) @ right(words(reads[1]), kind_b)
        if scales is not None:
            rows, columns = scales(lanes, active, warps)
            product = product * rows[:, :, None] * columns[:, None, :]
        # [warps, 16, 8] → [half, warps, 8, 4, column of two]
        sums = product.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1, 8, 4)
        total = (sums + words(reads[2]).view(np.float32)).astype(np.float32).view(np.uint32)
        lanes.undefined_in_warps()
        selected = (warps[:, None] * WARP + np.arange(WARP)).ravel()
        for at, write in enumerate(writes):
            write(lanes, spread(lanes, total[at].ravel(), selected, active), active)

    return step


def left(words: Array, kind: str) -> Array:
    """A, ``[warps, 16, k]`` in float64, of registers ``[4, warps, 8, 4]``."""
    parts = _DECODED[kind](np.ascontiguousarray(words)).reshape(2, 2, *words.shape[1:], -1)
    # [half of k, half of rows, warps, g, t, neighbours] → [warps, half of rows, g, half of k, t, neighbours]
    return parts.transpose(2, 1, 3, 0, 4, 5).reshape(words.shape[1], 16, -1)


def right(words: Array, kind: str) -> Array:
    """B, ``[warps, k, 8]``, of registers ``[2, warps, 8, 4]``."""
    parts = _DECODED[kind](np.ascontiguousarray(words)).reshape(2, *words.shape[1:], -1)
    # [half of k, warps, g, t, neighbours] → [warps, half of k, t, neighbours, g]
    return parts.transpose(1, 0, 3, 4, 2).reshape(words.shape[1], -1, 8)


def _scales(ops: Operands, asked: Instruction) -> Callable[[Lanes, Mask, Array], tuple[Array, Array]]:
    """Of the 16 rows and the 8 columns. A's are in lanes ``2 thread_id`` and the next of each group of four, for rows
    ``g`` and ``g + 8``; B's in lane ``thread_id``; ``byte_id`` is the byte."""
    read_a, read_b = ops.read(asked.operands[4], 32), ops.read(asked.operands[6], 32)
    (byte_a, thread_a), (byte_b, thread_b) = (map(int, vector(asked.operands[at])) for at in (5, 7))

    def scales(lanes: Lanes, active: Mask, warps: Array) -> tuple[Array, Array]:
        def exponents(read: Read) -> Array:
            words = np.ascontiguousarray(lanes.wide(read(lanes, active)).reshape(-1, 8, 4)[warps])
            return words.view(np.uint8).reshape(len(warps), 8, 4, 4)

        a, b = exponents(read_a), exponents(read_b)
        rows = np.concatenate([a[:, :, 2 * thread_a, byte_a], a[:, :, 2 * thread_a + 1, byte_a]], 1)
        return numbers.E8M0[rows], numbers.E8M0[b[:, :, thread_b, byte_b]]

    return scales
