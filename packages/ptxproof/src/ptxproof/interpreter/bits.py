"""Instructions on bits and predicates: logic, shifts, fields, selections and comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxproof.interpreter import numbers
from ptxproof.interpreter.lanes import Lanes, Mask
from ptxproof.interpreter.numbers import Array, bits_of
from ptxproof.interpreter.operands import Operands, Read, Step, elementwise, number_type, unknown
from ptxproof.ptx import PtxInstruction

_BITWISE: dict[str, Callable[..., Array]] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def build_bitwise(ops: Operands, instruction: PtxInstruction) -> Step:
    name, _, kind = instruction.opcode.partition(".")
    reads = [ops.read(source, bits_of(kind)) for source in instruction.operands[1:]]
    function = np.invert if name == "not" else _BITWISE[name]
    return elementwise(ops.write(instruction.operands[0]), function, *reads)


def build_shift(ops: Operands, instruction: PtxInstruction) -> Step:
    """``shl`` and ``shr``: by the width or more nothing is left but the sign."""
    name, _, kind = instruction.opcode.partition(".")
    dtype: Any = number_type(kind)
    shift: Callable[..., Array] = np.left_shift if name == "shl" else np.right_shift

    def run(value: Array, by: Array) -> Array:
        return shift(value, np.minimum(by, np.uint32(bits_of(kind))).astype(dtype))

    return elementwise(
        ops.write(instruction.operands[0], kind),
        run,
        ops.typed(instruction.operands[1], kind),
        ops.read(instruction.operands[2], 32),
    )


def build_bits(ops: Operands, instruction: PtxInstruction) -> Step:
    """``bfe``, ``bfi``, ``shf``, ``prmt``, ``lop3``, ``popc``, ``clz``, ``bfind``, ``brev``."""
    parts = instruction.opcode.split(".")
    name, kind = parts[0], parts[-1]
    target, *sources = instruction.operands
    bits = bits_of(kind) if kind[0] in "bsu" else 32
    write = ops.write(target)
    if name == "lop3":
        table = int(sources[3], 0)
        return elementwise(write, lambda a, b, c: numbers.lop3(a, b, c, table), *(ops.read(s, 32) for s in sources[:3]))
    if name == "prmt":
        if len(parts) > 2:
            raise unknown(instruction)
        read = _words(ops, _that_are_picked(sources))
        return elementwise(write, lambda a, b, c: numbers.permuted(*np.broadcast_arrays(a, b, c)), *read)
    if name == "shf":
        return elementwise(write, _funnel_left if parts[1] == "l" else _funnel_right, *_words(ops, sources))
    reads = [ops.read(sources[0], bits), *_words(ops, sources[1:])]
    if name == "bfe":
        return elementwise(write, _signed_field if kind[0] == "s" else _field, *reads)
    if name == "popc":
        return elementwise(write, lambda x: np.bitwise_count(x).astype(np.uint32), *reads)
    if name == "clz":
        return elementwise(write, numbers.leading_zeros, *reads)
    if name == "bfind" and kind == "u32":
        return elementwise(write, lambda x: np.uint32(31) - numbers.leading_zeros(x), *reads)
    raise unknown(instruction)


def _that_are_picked(sources: list[str]) -> list[str]:
    """``prmt``'s operands. A word of which a constant selector picks no byte may be undefined: it is not read."""
    low, high, selector = sources
    if selector[0].isdigit():
        picked = {int(selector.rstrip("U"), 0) >> at & 4 for at in (0, 4, 8, 12)}
        low, high = (low if 0 in picked else high), (high if 4 in picked else low)
    return [low, high, selector]


def _words(ops: Operands, sources: list[str]) -> list[Read]:
    return [ops.read(source, 32) for source in sources]


def _field(value: Array, position: Array, length: Array) -> Array:
    return (value >> position) & _ones(length)


def _signed_field(value: Array, position: Array, length: Array) -> Array:
    """Filled up with the field's highest bit, or with the word's where the field reaches beyond it."""
    last = np.minimum(position + np.maximum(length, np.uint32(1)) - np.uint32(1), np.uint32(31))
    negative = (length > 0) & (value >> last & np.uint32(1) > 0)
    inside = np.minimum(length, np.uint32(32) - np.minimum(position, np.uint32(32)))
    return np.where(negative, _field(value, position, length) | ~_ones(inside), _field(value, position, length))


def _ones(length: Array) -> Array:
    """The lowest ``length`` bits."""
    few = (np.uint32(1) << np.minimum(length, np.uint32(31))) - np.uint32(1)
    return np.where(length >= 32, np.uint32(0xFFFFFFFF), few)


def _pair(low: Array, high: Array) -> Array:
    return low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))


def _funnel_left(low: Array, high: Array, by: Array) -> Array:
    return ((_pair(low, high) << (by & np.uint32(31)).astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)


def _funnel_right(low: Array, high: Array, by: Array) -> Array:
    return (_pair(low, high) >> (by & np.uint32(31)).astype(np.uint64)).astype(np.uint32)


def build_select(ops: Operands, instruction: PtxInstruction) -> Step:
    """``selp``: what is not chosen may be undefined."""
    bits = bits_of(instruction.opcode.rpartition(".")[2])
    first, second = ops.read(instruction.operands[1], bits), ops.read(instruction.operands[2], bits)
    holds, write = ops.read(instruction.operands[3], 1), ops.write(instruction.operands[0])

    def step(lanes: Lanes, active: Mask) -> None:
        chosen = holds(lanes, active)
        whether = lanes.taken_undefined()
        a = first(lanes, active)
        of_first = lanes.taken_undefined()
        b = second(lanes, active)
        of_second = lanes.taken_undefined()
        lanes.undefined = whether | np.where(chosen, of_first, of_second)
        write(lanes, np.where(chosen, a, b), active)

    return step


_RELATIONS: dict[str, Callable[..., Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def build_comparison(ops: Operands, instruction: PtxInstruction) -> Step:
    """``setp``: an ordered relation does not hold for NaN, one that ends in ``u`` does."""
    parts = instruction.opcode.split(".")
    relation, kind = parts[1], parts[-1]
    floats = kind in ("f16", "f32", "f64", "bf16")
    reads = [ops.typed(source, kind) for source in instruction.operands[1:3]]
    combine = next((part for part in parts[2:-1] if part in _BITWISE), None)
    if combine is not None:
        reads.append(ops.read(instruction.operands[3], 1))
    first, *second = (name.strip() for name in instruction.operands[0].split("|"))
    write, write_other = ops.write(first), ops.write(second[0]) if second else None

    def compare(a: Array, b: Array) -> Array:
        if not floats:
            return _RELATIONS[relation](a, b)
        nan = np.isnan(a) | np.isnan(b)
        if relation in ("nan", "num"):
            return nan if relation == "nan" else ~nan
        if relation.endswith("u"):
            return _RELATIONS[relation[:2]](a, b) | nan
        return _RELATIONS[relation](a, b) & ~nan

    def step(lanes: Lanes, active: Mask) -> None:
        values = [read(lanes, active) for read in reads]
        holds = compare(values[0], values[1])
        other = ~holds
        if combine is not None:
            holds, other = _BITWISE[combine](holds, values[2]), _BITWISE[combine](other, values[2])
        write(lanes, holds, active)
        if write_other is not None:
            write_other(lanes, other, active)

    return step
